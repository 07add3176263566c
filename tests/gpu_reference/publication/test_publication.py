"""`mm2-gpu publish`: a golden at an address is certified, whole, and says what made it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import MANIFEST_NAME

OLD = Path(__file__).parents[2] / "old_files" / "golden"
SCHEMA = Path(__file__).parents[3] / "docs" / "schema" / "publication.schema.json"
ADDRESS = "s3://lab/goldens/toy"


@pytest.fixture
def uncertified(tmp_path: Path) -> Path:
    folder = tmp_path / "uncertified"
    shutil.copytree(OLD, folder)
    record = json.loads((folder / MANIFEST_NAME).read_text())
    del record["certificate"]
    (folder / MANIFEST_NAME).write_text(json.dumps(record))
    return folder


def names(s3: Any, prefix: str = "") -> list[str]:
    return [one["Key"] for one in s3.objects.list_objects_v2(Bucket="lab", Prefix=prefix).get("Contents", [])]


def publish(command: Any, golden: Path, *options: str, to: str = ADDRESS) -> click.testing.Result:
    result: click.testing.Result = command(mm2_gpu, "publish", "--golden", golden, "--to", to, *options)
    return result


def test_a_published_golden_is_read_by_its_address(s3: Any, command: Any) -> None:
    done = publish(command, OLD, "--json", "--quiet")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    jsonschema = pytest.importorskip(
        "jsonschema", reason="jsonschema is not installed: it is in the extra dev"
    )
    jsonschema.validate(record, json.loads(SCHEMA.read_text()))
    assert record["address"] == ADDRESS
    assert record["certified"] is True
    assert record["num_put"] == len(record["files"]) == len(list(OLD.iterdir())) + 1
    assert record["next"] == [f"mm2-test sweep --model toy --golden {ADDRESS}"]
    assert Capture.open(ADDRESS).manifest == Capture.open(OLD).manifest
    assert s3.asked("PUT")[-1].path.endswith(MANIFEST_NAME)


def test_the_card_says_what_made_it(s3: Any, command: Any) -> None:
    publish(command, OLD, "--quiet")
    card = s3.objects.get_object(Bucket="lab", Key="goldens/toy/README.md")["Body"].read().decode()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "pretty_name": "mm2 golden of toy",
        "tags": ["mm2", "minimax-m2", "golden"],
    }
    made = Capture.open(OLD).description.provenance
    assert f"sha256 {made.model.spec_digest}" in body
    assert f"transformers {made.versions['transformers']}" in body
    assert "weights bfloat16, router_gate float32" in body
    assert "2 rows of 7, 4 tokens" in body
    assert "14 of 14 checks passed" in body
    assert f"mm2-test sweep --model toy --golden {ADDRESS} --target my_port.py:DecoderLayer" in body


def test_what_is_there_is_not_put_again(s3: Any, command: Any) -> None:
    s3.plant("PUT", "model.safetensors", status=403, times=9)
    stopped = publish(command, OLD, "--quiet")
    assert stopped.exit_code == 3
    assert "model.safetensors of s3://lab/goldens/toy could not be put there" in stopped.stderr
    assert f"goldens/toy/{MANIFEST_NAME}" not in names(s3)
    s3.faults.clear()
    done = publish(command, OLD, "--json", "--quiet")
    assert json.loads(done.stdout)["num_put"] == 2


@pytest.mark.parametrize("to", [ADDRESS, "hf://datasets/owner/golden"])
def test_an_uncertified_golden_is_refused_unless_told(
    s3: Any, command: Any, uncertified: Path, to: str
) -> None:
    done = publish(command, uncertified, "--quiet", to=to)
    assert done.exit_code == 3
    assert f"the golden {uncertified} is not certified" in done.stderr
    assert "Or give --allow-uncertified." in done.stderr
    assert names(s3) == []


def test_a_damaged_golden_is_refused(s3: Any, command: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OLD, tmp_path / "damaged"))
    data = bytearray((folder / "layer_0.fp32.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "layer_0.fp32.safetensors").write_bytes(bytes(data))
    done = publish(command, folder, "--quiet")
    assert done.exit_code == 3
    assert "layer_0.fp32.safetensors" in done.stderr
    assert names(s3) == []


def test_a_place_that_is_not_there_is_told_before_tensors_are_read(
    s3: Any, command: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(OLD, tmp_path / "damaged"))
    (folder / "layer_0.safetensors").write_bytes(b"")
    done = publish(command, folder, "--quiet", to="s3://nowhere/golden")
    assert done.exit_code == 3
    assert "s3://nowhere/golden could not be written to" in done.stderr
    assert "layer_0" not in done.stderr


def test_another_golden_is_replaced_only_when_told(s3: Any, command: Any, uncertified: Path) -> None:
    publish(command, OLD, "--quiet")
    refused = publish(command, uncertified, "--quiet", "--allow-uncertified")
    assert refused.exit_code == 3
    assert f"another capture is at {ADDRESS}" in refused.stderr
    assert publish(command, uncertified, "--quiet", "--allow-uncertified", "--replace").exit_code == 0
    assert Capture.open(ADDRESS).certificate is None


def test_an_uncertified_golden_is_put_when_told(s3: Any, command: Any, uncertified: Path) -> None:
    done = publish(command, uncertified, "--quiet", "--allow-uncertified")
    assert done.exit_code == 0, done.output
    assert "certificate  none" in done.stdout
    card = s3.objects.get_object(Bucket="lab", Key="goldens/toy/README.md")["Body"].read().decode()
    assert "None: this golden was published without a check" in card


def test_a_run_of_a_port_is_no_golden(s3: Any, command: Any) -> None:
    done = publish(command, OLD.parent / "chained", "--quiet")
    assert done.exit_code == 3
    assert "is no golden" in done.stderr

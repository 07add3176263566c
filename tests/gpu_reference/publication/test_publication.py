"""`mm2-gpu publish`: a golden at an address is certified, whole, and says what made it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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


@pytest.fixture
def publish(s3: Any, command: Any) -> Callable[..., click.testing.Result]:
    """Publishes a golden, at `ADDRESS` unless told otherwise."""

    def run(golden: Path, *options: str, to: str = ADDRESS) -> click.testing.Result:
        result: click.testing.Result = command(
            mm2_gpu, "publish", "--golden", golden, "--to", to, "--quiet", *options
        )
        return result

    return run


def read_card(s3: Any) -> str:
    content: bytes = s3.objects.get_object(Bucket="lab", Key="goldens/toy/README.md")["Body"].read()
    return content.decode()


def damaged(folder: Path, name: str) -> Path:
    """A copy of the golden of which a file's last byte is another."""
    shutil.copytree(OLD, folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return folder


def test_a_published_golden_is_read_by_its_address(s3: Any, publish: Any) -> None:
    done = publish(OLD, "--json")
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


def test_the_card_says_what_made_it(s3: Any, publish: Any) -> None:
    publish(OLD)
    _, front, body = read_card(s3).split("---\n", 2)
    tags = ["mm2", "minimax-m2", "golden"]
    assert yaml.safe_load(front) == {"pretty_name": "mm2 golden of toy", "tags": tags}
    made = Capture.open(OLD).description.provenance
    assert f"sha256 {made.model.spec_digest}" in body
    assert f"transformers {made.versions['transformers']}" in body
    assert "weights bfloat16, router_gate float32" in body
    assert "2 rows of 7, 4 tokens" in body
    assert "14 of 14 checks passed" in body
    assert f"mm2-test sweep --model toy --golden {ADDRESS} --target my_port.py:DecoderLayer" in body


def test_what_is_there_is_not_put_again(s3: Any, publish: Any) -> None:
    s3.plant("PUT", "model.safetensors", status=403, times=9)
    stopped = publish(OLD)
    assert stopped.exit_code == 3
    assert "model.safetensors of s3://lab/goldens/toy could not be put there" in stopped.stderr
    assert f"goldens/toy/{MANIFEST_NAME}" not in names(s3)
    s3.faults.clear()
    done = publish(OLD, "--json")
    assert json.loads(done.stdout)["num_put"] == 2


@pytest.mark.parametrize("to", [ADDRESS, "hf://datasets/owner/golden"])
def test_an_uncertified_golden_is_refused_unless_told(
    s3: Any, publish: Any, uncertified: Path, to: str
) -> None:
    done = publish(uncertified, to=to)
    assert done.exit_code == 3
    assert f"the golden {uncertified} is not certified" in done.stderr
    assert "Or give --allow-uncertified." in done.stderr
    assert names(s3) == []


def test_a_damaged_golden_is_refused(s3: Any, publish: Any, tmp_path: Path) -> None:
    done = publish(damaged(tmp_path / "golden", "layer_0.fp32.safetensors"))
    assert done.exit_code == 3
    assert "layer_0.fp32.safetensors" in done.stderr
    assert names(s3) == []


def test_a_place_that_is_not_there_is_told_before_tensors_are_read(publish: Any, tmp_path: Path) -> None:
    done = publish(damaged(tmp_path / "golden", "layer_0.safetensors"), to="s3://nowhere/golden")
    assert done.exit_code == 3
    assert "s3://nowhere/golden could not be written to" in done.stderr
    assert "layer_0" not in done.stderr


def test_another_golden_and_an_uncertified_one_are_put_when_told(
    s3: Any, publish: Any, uncertified: Path
) -> None:
    publish(OLD)
    refused = publish(uncertified, "--allow-uncertified")
    assert refused.exit_code == 3
    assert f"another capture is at {ADDRESS}" in refused.stderr
    done = publish(uncertified, "--allow-uncertified", "--replace")
    assert done.exit_code == 0, done.output
    assert Capture.open(ADDRESS).certificate is None
    assert "certificate  none" in done.stdout
    assert "None: this golden was published without a check" in read_card(s3)


def test_a_run_of_a_port_is_no_golden(publish: Any) -> None:
    done = publish(OLD.parent / "chained")
    assert done.exit_code == 3
    assert "is no golden" in done.stderr

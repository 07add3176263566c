"""Commands take addresses where they take folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from compare.cli import main as mm2_compare
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.cli import mm2_split
from minimax_tools.hub.checkpoint_folder import list_files, resolve_config, resolve_model
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import layer_of
from neuron.cli import main as mm2_test

OLD = Path(__file__).parents[2] / "old_files"


def put(s3: Any, folder: Path, prefix: str) -> None:
    for path in folder.iterdir():
        s3.objects.put_object(Bucket="lab", Key=f"{prefix}/{path.name}", Body=path.read_bytes())


def test_two_captures_at_addresses_are_compared(s3: Any, command: Any) -> None:
    put(s3, OLD / "golden", "golden")
    put(s3, OLD / "swapped", "run")
    local = command(mm2_compare, "--golden", OLD / "golden", "--run", OLD / "swapped", "--json")
    remote = command(mm2_compare, "--golden", "s3://lab/golden", "--run", "s3://lab/run", "--json")
    assert remote.exit_code == local.exit_code == 1
    here, there = json.loads(local.stdout), json.loads(remote.stdout)
    assert there["reference"] == "s3://lab/golden"
    assert there["blame"] == here["blame"]
    assert any("--golden s3://lab/golden --run s3://lab/run" in line for line in there["next"])


def test_an_address_without_a_capture_ends_as_a_missing_folder_does(s3: Any) -> None:
    sides = ["--gpu-path", "s3://lab/none", "--neuron-path", str(OLD / "swapped")]
    done = CliRunner().invoke(mm2_compare, [*sides, "--json"])
    assert done.exit_code == 3
    assert json.loads(done.stdout)["verdict"] == "incomparable"
    assert "no capture at s3://lab/none" in done.stderr


def test_a_wrong_option_is_told_before_a_server_is_asked(s3: Any, command: Any) -> None:
    words = ("single-layer", "--layer", "1", "--backend", "cpu", "--model", OLD / "toy")
    sides = ("--golden", "s3://lab/golden", "--quiet")
    done = command(mm2_test, *words, *sides, "--atol", "none")
    assert done.exit_code == 2
    assert "--atol" in done.stderr
    assert s3.requests == []
    assert command(mm2_test, *words, *sides).exit_code == 3
    assert s3.requests


def test_a_model_at_an_address_comes_by_its_shards(s3: Any, toy: Path) -> None:
    put(s3, toy, "models/toy")
    assert set(list_files("s3://lab/models/toy")) == {path.name for path in toy.iterdir()}
    s3.forget()
    folder = resolve_config("s3://lab/models/toy")
    assert (folder / "config.json").read_bytes() == (toy / "config.json").read_bytes()
    assert not list(folder.glob("*.safetensors"))
    weight_map = json.loads((toy / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = {file for name, file in weight_map.items() if layer_of(name) in (None, 0)}
    assert resolve_model("s3://lab/models/toy", layers=range(1)) == folder
    assert {path.name for path in folder.glob("*.safetensors")} == wanted != set(weight_map.values())
    resolve_model("s3://lab/models/toy")
    for name in set(weight_map.values()):
        assert (folder / name).read_bytes() == (toy / name).read_bytes()
        assert len(s3.asked("GET", name)) == 1


def test_slices_of_a_model_at_an_address_are_fetched_and_cut(
    s3: Any, command: Any, toy: Path, tmp_path: Path
) -> None:
    put(s3, toy, "models/toy")
    plan = tmp_path / "plan.json"
    nodes = ("--node", "a:memory=1GB,layers=0:2", "--node", "b:memory=1GB,layers=2:4", "--planner", "manual")
    done = command(mm2_split, "plan", "--model", "s3://lab/models/toy", *nodes, "--output", plan, "--json")
    following = json.loads(done.stdout)["next"]
    assert following == [f"mm2-split fetch --plan {plan} --node {node}" for node in "ab"]
    fetched = command(mm2_split, "fetch", "--plan", plan, "--node", "a")
    assert fetched.exit_code == 0, fetched.output
    cut = command(mm2_split, "extract", "--plan", plan, "--node", "a", "--output", tmp_path / "slice")
    assert cut.exit_code == 0, cut.output
    fetched = {path.name for path in (tmp_path / "cache" / "models").rglob("*.safetensors")}
    assert fetched < {path.name for path in toy.glob("*.safetensors")}


def test_a_replaced_model_is_another(s3: Any, toy: Path) -> None:
    put(s3, toy, "models/toy")
    before = resolve_config("s3://lab/models/toy")
    s3.objects.put_object(Bucket="lab", Key="models/toy/config.json", Body=b"{}")
    after = resolve_config("s3://lab/models/toy")
    assert after != before
    assert (after / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("address", ["s3://lab/none", "s3://nowhere/model"])
def test_an_address_without_a_model_is_named(s3: Any, command: Any, address: str) -> None:
    done = command(mm2_gpu, "extract-all", "--model", address, "--quiet")
    assert done.exit_code == 3
    assert address in done.stderr


def test_a_golden_at_an_address_is_certified_there(s3: Any, command: Any) -> None:
    put(s3, OLD / "golden", "golden")
    Capture.open("s3://lab/golden").read(0, Site.OUTPUT)
    done = command(mm2_gpu, "certify", "--golden", "s3://lab/golden", "--quiet")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("s3://lab/golden: certified")
    s3.forget()
    certificate = Capture.open("s3://lab/golden").certificate
    assert certificate is not None
    assert certificate.not_checked  # the one before was made with its model
    Capture.open("s3://lab/golden").read(0, Site.OUTPUT)
    assert s3.asked("GET", "layer_0") == []
    card = s3.objects.get_object(Bucket="lab", Key="golden/README.md")["Body"].read().decode()
    assert str(certificate) in card


def test_a_certificate_that_cannot_be_put_is_printed(s3: Any, command: Any) -> None:
    put(s3, OLD / "golden", "golden")
    for name in ("manifest.json", "README.md"):
        s3.plant("PUT", name, status=403, times=9)
        done = command(mm2_gpu, "certify", "--golden", "s3://lab/golden", "--quiet")
        assert done.exit_code == 3
        assert done.stdout.startswith("s3://lab/golden: certified")
        assert f"{name} of s3://lab/golden could not be put there" in done.stderr
        # The golden can be read still.
        assert Capture.open("s3://lab/golden").is_complete
        s3.faults.clear()
    assert command(mm2_gpu, "certify", "--golden", "s3://lab/golden", "--quiet").exit_code == 0


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (mm2_split, ("synthesize", "--output", "s3://lab/toy")),
        (mm2_gpu, ("extract-all", "--model", OLD / "toy", "--captures", "s3://lab/captures")),
        (mm2_test, ("sweep", "--model", OLD / "toy", "--output-dir", "s3://lab/runs")),
        (mm2_compare, ("--report-path", "s3://lab/report")),
    ],
)
def test_an_option_for_folders_makes_no_folder_of_an_address(
    program: Any, words: tuple[Any, ...], command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(program, *words)
    assert done.exit_code == 2
    assert f"{words[-1]!r} is an address: expected a path of this machine" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_to_is_told(
    s3: Any, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(s3, OLD / "golden", "golden")
    (tmp_path / "file").touch()
    monkeypatch.setenv("MM2_CACHE", str(tmp_path / "file"))
    done = command(mm2_gpu, "show", "s3://lab/golden")
    assert done.exit_code == 3
    assert f"the cache at {tmp_path}/file" in done.stderr
    assert "set MM2_CACHE to another folder" in done.stderr

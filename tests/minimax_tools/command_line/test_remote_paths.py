"""Commands take addresses where they take folders."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from compare.cli import main as mm2_compare
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.remote_output import RemoteOutput
from minimax_tools.cli import mm2_split
from minimax_tools.errors import CaptureError
from minimax_tools.hub.checkpoint_folder import list_files, resolve_config, resolve_model
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import layer_of
from minimax_tools.remote.address import RemoteAddress
from mm2.golden_layer import open_golden
from neuron.cli import main as mm2_test

OLD = Path(__file__).parents[2] / "old_files"
EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"


def put(s3: Any, folder: Path, prefix: str) -> None:
    for path in folder.iterdir():
        s3.objects.put_object(Bucket="lab", Key=f"{prefix}/{path.name}", Body=path.read_bytes())


def test_two_captures_at_addresses_are_compared(s3: Any, command: Any) -> None:
    put(s3, OLD / "golden", "golden")
    put(s3, OLD / "swapped", "run")
    local = command(
        mm2_compare, "--gpu-path", OLD / "golden", "--neuron-path", OLD / "swapped", "--json", "--quiet"
    )
    remote = command(
        mm2_compare, "--gpu-path", "s3://lab/golden", "--neuron-path", "s3://lab/run", "--json", "--quiet"
    )
    assert remote.exit_code == local.exit_code == 1
    here, there = json.loads(local.stdout), json.loads(remote.stdout)
    assert there["reference"] == "s3://lab/golden"
    assert there["blame"] == here["blame"]
    assert any("--golden s3://lab/golden --run s3://lab/run" in line for line in there["next"])


def test_an_address_without_a_capture_ends_as_a_missing_folder_does(s3: Any) -> None:
    done = CliRunner().invoke(
        mm2_compare, ["--gpu-path", "s3://lab/none", "--neuron-path", str(OLD / "swapped"), "--json"]
    )
    assert done.exit_code == 3
    assert json.loads(done.stdout)["verdict"] == "incomparable"
    assert "no capture at s3://lab/none" in done.stderr


def test_a_capture_at_an_address_is_shown(s3: Any, command: Any) -> None:
    put(s3, OLD / "golden", "golden")
    assert "Capture s3://lab/golden" in command(mm2_gpu, "show", "s3://lab/golden", "--quiet").stdout


def test_a_run_is_put_at_its_address_when_it_is_whole(s3: Any, command: Any) -> None:
    put(s3, OLD / "golden", "golden")
    arguments = ["single-layer", "--layer", "1", "--backend", "cpu", "--model", OLD / "toy", "--quiet"]
    done = command(mm2_test, *arguments, "--golden", "s3://lab/golden", "--output-dir", "s3://lab/runs/one")
    assert done.exit_code == 0, done.output
    assert "  run     s3://lab/runs/one" in done.stdout
    assert s3.asked("PUT", "/runs/one/")[-1].path == "/lab/runs/one/manifest.json"
    assert Capture.open("s3://lab/runs/one").layers == (1,)


def test_a_bucket_that_cannot_take_the_run_is_found_before_it_runs(s3: Any, command: Any) -> None:
    done = command(
        mm2_test,
        *(
            "single-layer",
            "--layer",
            "1",
            "--backend",
            "cpu",
            "--model",
            OLD / "toy",
            "--seq-len",
            "8",
            "--quiet",
        ),
        *("--output-dir", "s3://nowhere/runs"),
    )
    assert done.exit_code == 3
    assert "there is no bucket 'nowhere'" in done.stderr
    assert done.stdout == ""


def test_a_run_that_cannot_be_put_fails_after_its_results(s3: Any, command: Any) -> None:
    s3.plant("PUT", "/runs/", status=403, times=99)
    arguments = ["single-layer", "--layer", "1", "--backend", "cpu", "--model", OLD / "toy", "--seq-len", "8"]
    done = command(mm2_test, *arguments, "--json", "--quiet", "--output-dir", "s3://lab/runs/one")
    assert done.exit_code == 3
    assert "could not be put there" in done.stderr
    assert json.loads(done.stdout)["complete"] is True


RUN = ("single-layer", "--layer", "1", "--backend", "cpu", "--model", str(OLD / "toy"), "--seq-len", "8")


def test_a_run_that_could_not_be_put_is_put_by_the_same_command(s3: Any, command: Any) -> None:
    s3.plant("PUT", "/runs/one/layer_1", status=403, times=99)
    failed = command(mm2_test, *RUN, "--output-dir", "s3://lab/runs/one")
    assert failed.exit_code == 3
    assert "the same command puts it, and computes nothing again" in failed.stderr
    s3.faults.clear()
    done = command(mm2_test, *RUN, "--output-dir", "s3://lab/runs/one")
    assert done.exit_code == 0, done.output
    assert "Resuming" in done.stderr
    assert "Layer 1 (2 of 2): took" in failed.stderr
    assert ": took" not in done.stderr  # no layer ran
    assert Capture.open("s3://lab/runs/one").layers == (1,)


def test_a_run_that_was_put_is_not_fetched_again(s3: Any, command: Any, tmp_path: Path) -> None:
    assert command(mm2_test, *RUN, "--quiet", "--output-dir", "s3://lab/runs/one").exit_code == 0
    assert not list((tmp_path / "cache" / "outputs").rglob("*.safetensors"))
    s3.forget()
    Capture.open("s3://lab/runs/one").read(1, Site.OUTPUT)
    assert s3.fetched() == []
    shown = command(mm2_test, *RUN, "--quiet", "--skip-compile", "--output-dir", "s3://lab/runs/one")
    assert shown.exit_code == 0, shown.output
    assert "Capture s3://lab/runs/one" in shown.stdout


def test_another_run_at_the_address_is_kept(s3: Any, command: Any, tmp_path: Path) -> None:
    put(s3, OLD / "golden", "golden")
    there = s3.objects.list_objects_v2(Bucket="lab")["Contents"]
    for program, words in (
        (mm2_test, RUN),
        (mm2_gpu, ("extract-all", "--model", OLD / "toy", "--seq-len", "5")),
    ):
        done = command(program, *words, "--quiet", "--output-dir", "s3://lab/golden")
        assert done.exit_code == 3
        assert "s3://lab/golden holds another finished capture: found other " in done.stderr
        assert "--overwrite" in done.stderr
    assert [one["ETag"] for one in s3.objects.list_objects_v2(Bucket="lab")["Contents"]] == [
        one["ETag"] for one in there
    ]
    done = command(mm2_test, *RUN, "--quiet", "--overwrite", "--output-dir", "s3://lab/golden")
    assert done.exit_code == 0, done.output
    assert Capture.open("s3://lab/golden").description.side == "neuron"


def waiting(folder: Path) -> RemoteOutput:
    """A whole run on this machine that goes to s3://lab/runs/one."""
    output = RemoteOutput.at(RemoteAddress.parse("s3://lab/runs/one"))
    output.open()
    shutil.copytree(folder, output.directory)
    return output


def test_a_capture_that_came_meanwhile_is_kept(s3: Any) -> None:
    output = waiting(OLD / "swapped")
    put(s3, OLD / "golden", "runs/one")
    with pytest.raises(
        CaptureError, match="another finished capture was put at s3://lab/runs/one while this one ran"
    ):
        output.put(overwrites=False)
    assert Capture.open("s3://lab/runs/one").manifest == Capture.open(OLD / "golden").manifest
    output.put(overwrites=True)
    assert Capture.open("s3://lab/runs/one").manifest == Capture.open(OLD / "swapped").manifest


def test_the_same_run_that_came_meanwhile_is_replaced_unless_it_alone_is_certified(
    s3: Any, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(OLD / "golden", tmp_path / "bare"))
    record = json.loads((bare / "manifest.json").read_text())
    del record["certificate"]
    (bare / "manifest.json").write_text(json.dumps(record))
    put(s3, OLD / "golden", "runs/one")
    output = waiting(bare)
    with pytest.raises(CaptureError, match="found other certificate"):
        output.put(overwrites=False)
    put(s3, bare, "runs/one")
    output.put(overwrites=False)
    assert not output.place.exists()
    waiting(OLD / "golden").put(overwrites=False)
    assert Capture.open("s3://lab/runs/one").manifest.is_certified


def test_a_half_at_the_address_is_no_capture_to_keep(s3: Any, tmp_path: Path) -> None:
    half = Path(shutil.copytree(OLD / "golden", tmp_path / "half"))
    record = json.loads((half / "manifest.json").read_text()) | {"complete": False}
    (half / "manifest.json").write_text(json.dumps(record))
    put(s3, half, "runs/one")
    waiting(OLD / "swapped").put(overwrites=False)
    assert Capture.open("s3://lab/runs/one").manifest == Capture.open(OLD / "swapped").manifest


def test_what_is_put_by_two_processes_is_put_once(s3: Any) -> None:
    output = waiting(OLD / "swapped")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: output.put(overwrites=False), range(2)))
    assert len(s3.asked("PUT")) == len(list((OLD / "swapped").iterdir()))


def test_a_killed_run_is_not_resumed_where_another_came(s3: Any, command: Any) -> None:
    first = command(mm2_test, *RUN, "--quiet", "--output-dir", "s3://lab/runs/one")
    assert first.exit_code == 0, first.output
    here = Capture.open("s3://lab/runs/one").directory
    output = waiting(here)
    record = json.loads((here / "manifest.json").read_text()) | {"complete": False}
    (output.directory / "manifest.json").write_text(json.dumps(record))
    put(s3, OLD / "golden", "runs/one")
    done = command(mm2_test, *RUN, "--quiet", "--output-dir", "s3://lab/runs/one")
    assert done.exit_code == 3
    assert "s3://lab/runs/one holds another finished capture" in done.stderr


def test_another_run_that_waits_to_be_put_is_kept(s3: Any, command: Any) -> None:
    output = waiting(OLD / "swapped")
    done = command(mm2_test, *RUN, "--quiet", "--output-dir", "s3://lab/runs/one")
    assert done.exit_code == 3
    assert f"another finished run waits in {output.directory} to be put at s3://lab/runs/one" in done.stderr
    assert s3.asked("PUT") == []


def test_a_search_is_put_and_says_where(s3: Any, command: Any) -> None:
    put(s3, OLD / "golden", "golden")
    s3.forget()
    arguments = (
        "bisect",
        "--model",
        OLD / "toy",
        "--golden",
        "s3://lab/golden",
        "--backend",
        "cpu",
        "--json",
    )
    done = command(mm2_test, *arguments, "--quiet", "--output-dir", "s3://lab/search")
    record = json.loads(done.stdout)
    assert (record["reference"], record["directory"]) == ("s3://lab/golden", "s3://lab/search")
    assert all("--golden s3://lab/golden" in line for line in record["next"])
    assert [one.path for one in s3.asked("PUT")] == ["/lab/search/bisection.json"]
    shown = command(mm2_split, "cache").stdout
    assert "s3://lab/search" in shown
    assert "not put there yet" not in shown
    again = command(mm2_test, *arguments, "--quiet", "--output-dir", "s3://lab/search")
    assert json.loads(again.stdout)["runs_resumed"] > 0


def test_a_wrong_option_is_told_before_a_server_is_asked(s3: Any, command: Any) -> None:
    sides = ("--golden", "s3://lab/golden", "--output-dir", "s3://lab/runs/one", "--quiet")
    done = command(mm2_test, *RUN, *sides, "--atol", "none")
    assert done.exit_code == 2
    assert "--atol" in done.stderr
    assert s3.requests == []
    assert command(mm2_test, *RUN, *sides).exit_code == 3
    assert s3.requests


@pytest.mark.slow
def test_the_first_of_several_ranks_puts_the_run(
    s3: Any, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(s3, OLD / "golden", "golden")
    ranks = ("--tp-degree", "2", "--target", EXAMPLES / "tensor_parallel_port.py:DecoderLayer")
    arguments = ("sweep", "--backend", "cpu", "--model", OLD / "toy", "--golden", OLD / "golden", *ranks)
    s3.plant("PUT", "/runs/", status=403, times=1)
    failed = command(mm2_test, *arguments, "--quiet", "--output-dir", "s3://lab/runs/one")
    assert failed.exit_code == 3
    # The process that started the ranks tried to put nothing itself.
    assert len(s3.asked("PUT", "/runs/")) == 1
    s3.forget()
    done = command(mm2_test, *arguments, "--quiet", "--output-dir", "s3://lab/runs/one")
    assert done.exit_code == 0, done.output
    names = [one.path.rpartition("/")[2] for one in s3.asked("PUT", "/runs/")]
    assert names == ["inputs.safetensors", "layer_0.safetensors", "layer_1.safetensors", "manifest.json"]


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


def test_headers_of_a_model_at_an_address_are_enough(s3: Any, command: Any, toy: Path) -> None:
    put(s3, toy, "models/toy")
    s3.forget()
    remote = json.loads(command(mm2_split, "memory", "--model", "s3://lab/models/toy", "--json").stdout)
    local = json.loads(command(mm2_split, "memory", "--model", toy, "--json").stdout)
    assert remote["from"] == "headers"
    assert (remote["dtypes"], remote["parts"]) == (local["dtypes"], local["parts"])
    assert {one.range for one in s3.asked("GET", "/model-0")} >= {"bytes=0-7"}
    assert len(s3.asked("GET", "/model-0")) == 2 * len(list(toy.glob("*.safetensors")))


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


@pytest.mark.parametrize("name", ["manifest.json", "README.md"])
def test_a_certificate_that_cannot_be_put_is_printed(s3: Any, command: Any, name: str) -> None:
    put(s3, OLD / "golden", "golden")
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
    for words in (("show", "s3://lab/golden"), ("extract-all", "--output-dir", "s3://lab/new")):
        done = command(mm2_gpu, *words)
        assert done.exit_code == 3
        assert f"the cache at {tmp_path}/file" in done.stderr
        assert "set MM2_CACHE to another folder" in done.stderr


def test_help_says_what_takes_an_address(command: Any) -> None:
    text = command(mm2_test, "sweep", "--help").stdout
    assert "--golden FOLDER|s3://…|hf://…" in text
    assert "--output-dir FOLDER|s3://…|hf://…" in text
    assert "--model FOLDER|HUB_ID|s3://…" in text
    for program in (mm2_gpu, mm2_test):
        assert "show [OPTIONS] FOLDER|s3://…|hf://…" in command(program, "show", "--help").stdout
    # A search of a whole port, and folders that are made, take no address.
    assert "--captures DIRECTORY" in text


def test_a_port_s_own_tests_take_a_golden_at_an_address(s3: Any) -> None:
    put(s3, OLD / "golden", "golden")
    golden = open_golden("s3://lab/golden", model=OLD / "toy")
    local = open_golden(OLD / "golden", model=OLD / "toy")
    assert torch.equal(golden.layer(1).input, local.layer(1).input)

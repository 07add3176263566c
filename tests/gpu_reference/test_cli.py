from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from goldens import contents

from gpu_reference.cli import main
from minimax_tools.capture.reader import Capture
from minimax_tools.machine.files import locked_directory
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.text.tokenizer import encode_texts

SHORT = ("--seq-len", "8", "--noise-floor", "off")
TOY = ("--model", "TOY", "--output-dir", "capture")
LAYER_0 = ("single-layer", "--layer", 0, *TOY, *SHORT)

Gpu = Callable[..., Any]


@pytest.fixture
def gpu(toy: Path, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Runs mm2-gpu in the test's folder; TOY stands for the toy."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: command(main, *(toy if word == "TOY" else word for word in words))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root mounts a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_captures_lie_under_the_captures_folder(
    gpu: Gpu, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MM2_CAPTURES", "named")
    gpu("extract-all", "--model", "TOY", *SHORT)
    gpu("multi-layer", "--layers", "1:3", "--model", "TOY", *SHORT)
    monkeypatch.setenv("MM2_MODEL", str(toy))
    gpu("single-layer", "--layer", 2, "--captures", "given", *SHORT)
    found = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("manifest.json")}
    of_environment = {"named/gpu_reference/full_model", "named/gpu_reference/layers_1_to_2"}
    assert found == {*of_environment, "given/gpu_reference/single_layer_2"}


@pytest.mark.parametrize(
    ("options", "layers"),
    [(["--start-layer", "1", "--end-layer", "2"], (1, 2)), (["--layers", "0:1"], (0,)), ([], (0, 1, 2, 3))],
)
def test_both_notations_of_a_span(gpu: Gpu, options: list[str], layers: tuple[int, ...]) -> None:
    assert gpu("multi-layer", *TOY, *SHORT, "--sites", "layer", *options).exit_code == 0
    assert Capture.open("capture").layers == layers


@pytest.mark.parametrize(("level", "num_sites"), [("layer", 2), ("component", 9), ("all", 18)])
def test_levels_of_sites(gpu: Gpu, level: str, num_sites: int) -> None:
    gpu(*LAYER_0, "--sites", level)
    sites = Capture.open("capture").sites(0)
    assert len(sites) == num_sites
    assert {Site.INPUT, Site.OUTPUT} <= set(sites)


def test_nothing_is_written_with_no_save(gpu: Gpu, toy: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in toy.iterdir())
    result = gpu("full", "--model", "TOY", *SHORT, "--max-new-tokens", 2, "--no-save")
    assert result.exit_code == 0
    assert "Not saved" in result.stdout
    assert "moe_delta" in result.stdout
    assert "Row 0 continues with 2 tokens" in result.stdout
    assert list(tmp_path.iterdir()) == []
    assert sorted(path.name for path in toy.iterdir()) == before


def test_generation_is_saved_and_shown(gpu: Gpu, toy: Path, tmp_path: Path) -> None:
    prompt = "The capital of France is"
    options = ("--prompt", prompt, "--noise-floor", "off", "--max-new-tokens", 5, "--json")
    made = json.loads(gpu("full", *TOY, *options).stdout)["generation"]
    stored = json.loads((tmp_path / "capture/generation.json").read_text())
    assert made == stored
    (row,) = stored["rows"]
    assert stored["sampling"]["max_new_tokens"] == len(row["generated_ids"]) == 5
    assert row["prompt_ids"] == encode_texts(toy, [prompt], chat=False)[0]
    assert json.loads(gpu("show", "capture", "--json").stdout)["generation"] == stored
    assert f"ids   {' '.join(map(str, row['generated_ids']))}" in gpu("show", "capture").stdout


def test_show_prints_every_site_with_its_statistics(gpu: Gpu, golden: Path) -> None:
    text = gpu("show", golden).stdout
    assert all(str(site) in text for site in (*ModelGraph().sites, *ModelSite))
    record = json.loads(gpu("show", golden, "--json").stdout)
    assert record["complete"] is True
    assert len(record["layers"][2]["sites"]) == 18


def test_progress_goes_to_stderr_and_quiet_silences_it(gpu: Gpu) -> None:
    words = ("single-layer", "--layer", 1, *TOY, *SHORT)
    loud, quiet = gpu(*words), gpu(*words, "--overwrite", "--quiet")
    assert "Loading 2 layers" in loud.stderr
    assert "cpu: the whole model" in loud.stderr
    assert "Layer 1 (1 of 1)" in loud.stderr
    assert "Loading" not in loud.stdout
    assert quiet.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["extract-all"], 2, "no checkpoint is named"),
        (["single-layer", "--layer", 4, *TOY], 2, "layer 4 is out of range: expected layers 0 to 3"),
        (["multi-layer", "--layers", "3:1", *TOY], 2, "layers 3:1 are no span"),
        (["multi-layer", "--layers", "0:1", "--end-layer", 2, *TOY], 2, "were both given"),
        (["full", "--top-k", 3, *TOY], 2, "--top-k has no effect on greedy generation"),
        (["extract-all", "--max-memory", "many", *TOY], 2, "--max-memory 'many' cannot be read"),
        (["extract-all", "--input-ids", "1,512", *TOY], 2, "row 0 holds the id 512: expected ids from 0"),
        (["extract-all", "--model", "absent"], 3, "no checkpoint at"),
        (["extract-all", "--model", "notes"], 3, "no config.json"),
        (["show", "absent"], 3, "there is no capture directory"),
        (
            [*LAYER_0, "--output-dir", "notes"],
            3,
            "is not empty and holds no capture: found readme.txt. Choose another --output-dir",
        ),
    ],
)
def test_wrong_usage_and_what_cannot_run_end_with_their_codes(
    gpu: Gpu, tmp_path: Path, arguments: list[Any], code: int, message: str
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/readme.txt").write_text("mine")
    result = gpu(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["notes", "readme.txt"]


def test_error_is_json_too_where_json_was_asked_for(gpu: Gpu) -> None:
    record = json.loads(gpu("show", "absent", "--json").stdout)
    assert (record["exit_code"], record["verdict"]) == (3, "incomparable")
    assert "there is no capture directory" in record["error"]


def test_full_disk_is_an_error_that_names_file_and_free_space(gpu: Gpu, small_disk: Path) -> None:
    directory = small_disk / "capture"
    words = ("extract-all", *TOY, "--seq-len", "48", "--noise-floor", "off", "--output-dir", directory)
    full = gpu(*words)
    assert full.exit_code == 3
    assert f"no space left to write {directory}/layer_" in full.stderr
    assert "MB free. Free some space" in full.stderr
    stored = Capture.open(directory).layers
    assert 0 < len(stored) < 4
    assert [path.name for path in directory.glob(".*")] == []
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    resumed = gpu(*words)
    assert resumed.exit_code == 0
    assert f"after layer {max(stored)}." in resumed.stderr


def test_directory_locked_by_another_run_is_refused(gpu: Gpu) -> None:
    with locked_directory(Path("capture")):
        refused = gpu(*LAYER_0)
    assert refused.exit_code == 3
    assert "the output directory capture is in use by another run" in refused.stderr
    assert gpu(*LAYER_0).exit_code == 0


@pytest.fixture(scope="module")
def made(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "golden"
    words = ("single-layer", "--layer", 0, "--model", toy, "--seq-len", 8, "--output-dir", directory)
    assert CliRunner().invoke(main, [*map(str, words)]).exit_code == 0
    return directory


@pytest.fixture
def kept(made: Path, tmp_path: Path) -> Path:
    """A golden of layer 0, where another one is to be written."""
    return Path(shutil.copytree(made, tmp_path / "capture"))


@pytest.fixture
def remake(gpu: Gpu, kept: Path) -> Gpu:
    """Makes a golden where that one lies, the same unless options say otherwise."""
    return lambda *options: gpu("single-layer", "--layer", 0, *TOY, "--seq-len", 8, *options)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--seq-len", 9), "holds another finished capture: found other inputs_digest"),
        # A difference that only the loaded model tells.
        (("--attn-implementation", "eager"), "other options.attn_implementation"),
    ],
)
def test_other_golden_is_kept_unless_told(
    remake: Gpu, kept: Path, options: tuple[object, ...], found: str
) -> None:
    before = contents(kept)
    refused = remake(*options)
    assert refused.exit_code == 3
    assert found in refused.stderr
    assert "Add --overwrite to replace it, or name another folder with --output-dir" in refused.stderr
    assert ("Loading" in refused.stderr) == ("--seq-len" not in options)
    assert contents(kept) == before
    assert remake(*options, "--overwrite").exit_code == 0
    assert contents(kept) != before


def test_same_golden_is_left_and_certified_where_it_is_asked_for(remake: Gpu, kept: Path) -> None:
    written = {path: path.stat().st_mtime_ns for path in kept.glob("*.safetensors")}
    again = remake()
    assert again.exit_code == 0
    assert "finished: it is left as it is. --overwrite makes it anew." in again.stderr
    assert not Capture.open(kept).manifest.is_certified
    assert remake("--certify").exit_code == 0
    assert Capture.open(kept).manifest.is_certified
    certified = contents(kept)
    for options in ((), ("--certify",)):
        assert remake(*options).exit_code == 0
        assert contents(kept) == certified
    assert {path: path.stat().st_mtime_ns for path in written} == written
    # Asked for, it is made again, and must be certified again.
    assert remake("--overwrite").exit_code == 0
    assert not Capture.open(kept).manifest.is_certified


def test_damaged_manifest_is_named_and_made_anew(gpu: Gpu, remake: Gpu, kept: Path) -> None:
    manifest = kept / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole[: len(whole) // 2])
    shown = gpu("show", kept)
    assert shown.exit_code == 3
    assert "manifest.json is damaged" in shown.stderr
    again = remake()
    assert "Starting anew" in again.stderr
    assert "is damaged" in again.stderr
    assert manifest.read_text() == whole


def test_same_golden_that_is_damaged_is_made_anew(remake: Gpu, kept: Path) -> None:
    before = contents(kept)
    damaged = next(kept.glob("layer_*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\x00\x01\x02\x03")
    again = remake()
    assert again.exit_code == 0
    assert "is damaged, and is made anew" in again.stderr
    assert contents(kept) == before

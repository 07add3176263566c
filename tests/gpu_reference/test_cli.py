from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_reference.cli import main
from minimax_tools.capture.reader import Capture
from minimax_tools.machine.files import locked_directory
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.text.tokenizer import encode_texts

SHORT = ["--seq-len", "8", "--noise-floor", "off"]


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


def test_captures_lie_under_the_captures_folder(toy: Path, tmp_path: Path, command: Any) -> None:
    common = ["--model", toy, "--captures", tmp_path, *SHORT, "--quiet"]
    command(main, "extract-all", *common)
    command(main, "single-layer", "--layer", 2, *common)
    command(main, "multi-layer", "--layers", "1:3", *common)
    names = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("manifest.json")}
    runs = ("full_model", "single_layer_2", "layers_1_to_2")
    assert names == {f"gpu_reference/{run}" for run in runs}


def test_environment_names_model_and_captures(
    toy: Path, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MM2_MODEL", str(toy))
    monkeypatch.setenv("MM2_CAPTURES", str(tmp_path))
    assert command(main, "single-layer", "--layer", 0, *SHORT, "--quiet").exit_code == 0
    assert (tmp_path / "gpu_reference/single_layer_0/manifest.json").exists()


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        (["--start-layer", "1", "--end-layer", "2"], (1, 2)),
        (["--layers", "1:3"], (1, 2)),
        (["--layers", "0:1"], (0,)),
        ([], (0, 1, 2, 3)),
    ],
)
def test_both_notations_of_a_span(
    toy: Path, tmp_path: Path, command: Any, options: list[str], layers: tuple[int, ...]
) -> None:
    arguments = ["--model", toy, "--output-dir", tmp_path / "capture", *SHORT, "--sites", "layer"]
    assert command(main, "multi-layer", *arguments, *options).exit_code == 0
    assert Capture.open(tmp_path / "capture").layers == layers


@pytest.mark.parametrize(("level", "num_sites"), [("layer", 2), ("component", 9), ("all", 18)])
def test_levels_of_sites(toy: Path, tmp_path: Path, command: Any, level: str, num_sites: int) -> None:
    arguments = ["--model", toy, "--output-dir", tmp_path / "capture", *SHORT]
    command(main, "single-layer", "--layer", 1, *arguments, "--sites", level)
    capture = Capture.open(tmp_path / "capture")
    assert len(capture.sites(1)) == num_sites
    assert {Site.INPUT, Site.OUTPUT} <= set(capture.sites(1))


def test_nothing_is_written_with_no_save(
    toy: Path, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in toy.iterdir())
    result = command(main, "full", "--model", toy, *SHORT, "--max-new-tokens", 2, "--no-save")
    assert result.exit_code == 0
    assert "Not saved" in result.stdout
    assert "moe_delta" in result.stdout
    assert "Row 0 continues with 2 tokens" in result.stdout
    assert list(tmp_path.iterdir()) == []
    assert sorted(path.name for path in toy.iterdir()) == before


def test_generation_is_saved_and_shown(toy: Path, tmp_path: Path, command: Any) -> None:
    arguments = ["--prompt", "The capital of France is", "--noise-floor", "off", "--max-new-tokens", 5]
    made = command(main, "full", "--model", toy, "--output-dir", tmp_path, *arguments, "--json")
    stored = json.loads((tmp_path / "generation.json").read_text())
    assert json.loads(made.stdout)["generation"] == stored
    assert stored["rows"][0]["prompt_ids"] == encode_texts(toy, ["The capital of France is"], chat=False)[0]
    assert json.loads(command(main, "show", tmp_path, "--json").stdout)["generation"] == stored
    ids = " ".join(str(token) for token in stored["rows"][0]["generated_ids"])
    assert f"ids   {ids}" in command(main, "show", tmp_path).stdout


def test_show_prints_every_site_with_its_statistics(golden: Path, command: Any) -> None:
    text = command(main, "show", golden).stdout
    assert all(str(site) in text for site in (*Site, *ModelSite))
    record = json.loads(command(main, "show", golden, "--json").stdout)
    assert record["complete"] is True
    assert len(record["layers"][2]["sites"]) == 18


def test_progress_goes_to_stderr_and_quiet_silences_it(toy: Path, tmp_path: Path, command: Any) -> None:
    arguments = ["single-layer", "--layer", 1, "--model", toy, *SHORT, "--output-dir"]
    loud = command(main, *arguments, tmp_path / "loud")
    quiet = command(main, *arguments, tmp_path / "quiet", "--quiet")
    assert "Loading 2 layers" in loud.stderr
    assert "cpu: the whole model" in loud.stderr
    assert "Layer 1 (1 of 1)" in loud.stderr
    assert "Loading" not in loud.stdout
    assert quiet.stderr == ""


def test_wrong_usage_exits_with_2(toy: Path, tmp_path: Path, command: Any) -> None:
    common = ["--model", toy, "--output-dir", tmp_path / "capture"]
    for arguments, message in (
        (["single-layer", "--layer", 4, *common], "layer 4 is out of range: expected layers 0 to 3"),
        (["multi-layer", "--layers", "3:1", *common], "layers 3:1 are no span"),
        (["multi-layer", "--layers", "0:1", "--end-layer", 2, *common], "were both given"),
        (["full", "--top-k", 3, *common], "--top-k has no effect on greedy generation"),
        (["extract-all", "--max-memory", "many", *common], "--max-memory 'many' cannot be read"),
        (
            ["extract-all", "--input-ids", "1,512", *common],
            "row 0 holds the id 512: expected ids from 0 to 511",
        ),
        (["extract-all"], "no checkpoint is named"),
    ):
        result = command(main, *arguments)
        assert result.exit_code == 2, arguments
        assert message in result.stderr
    assert not (tmp_path / "capture").exists()


def test_what_cannot_run_exits_with_3(toy: Path, tmp_path: Path, command: Any) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/readme.txt").write_text("mine")
    for arguments, message in (
        (["extract-all", "--model", tmp_path / "absent"], "no checkpoint at"),
        (["extract-all", "--model", tmp_path / "notes"], "no config.json"),
        (["show", tmp_path / "absent"], "there is no capture directory"),
        (
            ["single-layer", "--layer", 0, "--model", toy, *SHORT, "--output-dir", tmp_path / "notes"],
            "is not empty and holds no capture: found readme.txt. Choose another --output-dir",
        ),
    ):
        result = command(main, *arguments)
        assert result.exit_code == 3, arguments
        assert message in result.stderr
        assert "Traceback" not in result.stderr
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["readme.txt"]


def test_error_is_json_too_where_json_was_asked_for(tmp_path: Path, command: Any) -> None:
    result = command(main, "show", tmp_path / "absent", "--json")
    record = json.loads(result.stdout)
    assert (record["exit_code"], record["verdict"]) == (3, "incomparable")
    assert "there is no capture directory" in record["error"]


def test_full_disk_is_an_error_that_names_file_and_free_space(
    toy: Path, small_disk: Path, command: Any
) -> None:
    directory = small_disk / "capture"
    arguments = ["extract-all", "--model", toy, "--seq-len", "48", "--noise-floor", "off"]
    full = command(main, *arguments, "--output-dir", directory)
    assert full.exit_code == 3
    assert f"no space left to write {directory}/layer_" in full.stderr
    assert "MB free. Free some space" in full.stderr
    stored = Capture.open(directory).layers
    assert 0 < len(stored) < 4
    assert [path.name for path in directory.glob(".*")] == []
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    resumed = command(main, *arguments, "--output-dir", directory)
    assert resumed.exit_code == 0
    assert f"after layer {max(stored)}." in resumed.stderr


def test_damaged_manifest_is_named_and_made_anew(toy: Path, tmp_path: Path, command: Any) -> None:
    arguments = ["single-layer", "--layer", 0, "--model", toy, *SHORT, "--output-dir", tmp_path]
    command(main, *arguments)
    whole = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(whole[: len(whole) // 2])
    shown = command(main, "show", tmp_path)
    assert shown.exit_code == 3
    assert "manifest.json is damaged" in shown.stderr
    again = command(main, *arguments)
    assert "Starting anew" in again.stderr
    assert "is damaged" in again.stderr
    assert (tmp_path / "manifest.json").read_text() == whole


def test_directory_locked_by_another_run_is_refused(toy: Path, tmp_path: Path, command: Any) -> None:
    arguments = ["single-layer", "--layer", 0, "--model", toy, *SHORT, "--output-dir", tmp_path]
    with locked_directory(tmp_path):
        refused = command(main, *arguments)
    assert refused.exit_code == 3
    assert f"the output directory {tmp_path} is in use by another run" in refused.stderr
    assert command(main, *arguments).exit_code == 0

"""Goldens that lie where another one is to be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_reference.cli import main
from minimax_tools.capture.reader import Capture


@pytest.fixture
def make(toy: Path, tmp_path: Path, command: Any) -> Any:
    """Makes a golden of layer 0 in one folder."""

    def run(*options: object) -> Any:
        place = ("--model", toy, "--output-dir", tmp_path / "golden")
        return command(main, "single-layer", "--layer", 0, *place, *options)

    return run


def bytes_of(tmp_path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (tmp_path / "golden").iterdir() if path.is_file()}


def test_other_golden_is_kept_and_the_model_is_not_loaded(make: Any, tmp_path: Path) -> None:
    assert make("--seq-len", 8).exit_code == 0
    before = bytes_of(tmp_path)
    refused = make("--seq-len", 9)
    assert refused.exit_code == 3
    assert "holds another finished capture: found other inputs_digest" in refused.stderr
    assert "Add --overwrite to replace it, or name another folder with --output-dir" in refused.stderr
    assert "Loading" not in refused.stderr
    assert bytes_of(tmp_path) == before
    assert make("--seq-len", 9, "--overwrite").exit_code == 0
    assert Capture.open(tmp_path / "golden").read_inputs().lengths == (9,)


def test_same_golden_is_left_and_certified_where_it_is_asked_for(make: Any, tmp_path: Path) -> None:
    assert make("--seq-len", 8).exit_code == 0
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "golden").glob("*.safetensors")}
    assert make("--seq-len", 8).exit_code == 0
    assert not Capture.open(tmp_path / "golden").manifest.is_certified
    assert make("--seq-len", 8, "--certify").exit_code == 0
    assert Capture.open(tmp_path / "golden").manifest.is_certified
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_same_golden_that_is_damaged_is_made_anew(make: Any, tmp_path: Path) -> None:
    assert make("--seq-len", 8).exit_code == 0
    before = bytes_of(tmp_path)
    damaged = next((tmp_path / "golden").glob("layer_*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\x00\x01\x02\x03")
    again = make("--seq-len", 8)
    assert again.exit_code == 0
    assert "is damaged, and is made anew" in again.stderr
    assert bytes_of(tmp_path) == before


def test_same_certified_golden_is_left_as_it_is(make: Any, tmp_path: Path) -> None:
    assert make("--seq-len", 8, "--certify").exit_code == 0
    before = bytes_of(tmp_path)
    again = make("--seq-len", 8)
    assert again.exit_code == 0
    assert "finished: it is left as it is. --overwrite makes it anew." in again.stderr
    assert bytes_of(tmp_path) == before
    assert Capture.open(tmp_path / "golden").manifest.is_certified
    assert make("--seq-len", 8, "--certify").exit_code == 0
    assert bytes_of(tmp_path) == before
    # Asked for, it is made again, and must be certified again.
    assert make("--seq-len", 8, "--overwrite").exit_code == 0
    assert not Capture.open(tmp_path / "golden").manifest.is_certified


def test_difference_that_only_the_model_tells_is_refused_too(make: Any) -> None:
    assert make("--seq-len", 8).exit_code == 0
    refused = make("--seq-len", 8, "--attn-implementation", "eager")
    assert refused.exit_code == 3
    assert "other options.attn_implementation" in refused.stderr

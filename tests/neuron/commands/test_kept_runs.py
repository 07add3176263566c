"""Runs of a port that is edited between them: none replaces another unannounced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.capture.reader import Capture

PORT = "class Port(ReferenceLayer):\n    pass\n"


@pytest.fixture
def sweep(run: Any, small_fp8: Path, small_golden: Path, write_port: Any) -> Any:
    """Runs layer 1 of the port as it is, then judges it."""

    def run_port(source: str, *options: object) -> Any:
        target = write_port(source)
        sides = ("--model", small_fp8, "--golden", small_golden, "--target", target, "--backend", "cpu")
        return run("single-layer", "--layer", 1, *sides, *options)

    return run_port


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "captures" / "neuron").iterdir())


def test_edited_port_gets_a_folder_of_its_own(sweep: Any, tmp_path: Path) -> None:
    assert sweep(PORT).exit_code == 0
    mended = sweep(PORT + "# mended\n")
    assert mended.exit_code == 0
    assert "since" in mended.stderr
    assert "(other target_digest)" in mended.stderr
    assert folders(tmp_path) == ["single_layer_1", "single_layer_1_2"]
    # The next command finds the place again by itself.
    assert "--output-dir" not in mended.stdout
    # Without an edit, the same place is taken again.
    assert "single_layer_1_2" in sweep(PORT + "# mended\n", "--quiet").stdout
    assert len(folders(tmp_path)) == 2


def test_overwrite_replaces_the_run(sweep: Any, tmp_path: Path) -> None:
    sweep(PORT)
    before = Capture.open(tmp_path / "captures" / "neuron" / "single_layer_1").description
    assert sweep(PORT + "# mended\n", "--overwrite").exit_code == 0
    after = Capture.open(tmp_path / "captures" / "neuron" / "single_layer_1").description
    assert folders(tmp_path) == ["single_layer_1"]
    assert before.differences(after) == ["target_digest"]


def test_named_folder_is_refused_before_anything_runs(sweep: Any, tmp_path: Path) -> None:
    place = ("--output-dir", tmp_path / "mine")
    sweep(PORT, *place)
    stored = (tmp_path / "mine" / "manifest.json").read_bytes()
    refused = sweep(PORT + "# mended\n", *place, "--json")
    assert refused.exit_code == 3
    record = json.loads(refused.stdout)
    assert "holds another finished capture: found other target_digest" in record["error"]
    assert "--overwrite" in record["error"]
    assert "Layer 1" not in refused.stderr
    assert (tmp_path / "mine" / "manifest.json").read_bytes() == stored
    assert sweep(PORT + "# mended\n", *place, "--overwrite").exit_code == 0


def test_saved_run_is_the_newest_of_the_numbered(sweep: Any) -> None:
    sweep(PORT)
    sweep(PORT + "# mended\n")
    assert "single_layer_1_2" in sweep(PORT + "# mended\n", "--skip-compile").stdout

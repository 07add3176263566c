from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.weight_files import INDEX_FILE
from minimax_tools.model.weight_names import layer_of


def _shards_of(folder: Path, *layers: int) -> set[str]:
    """The shards that hold those layers or what belongs to none."""
    entries = TensorIndex.from_folder(folder).entries.values()
    return {entry.file.name for entry in entries if layer_of(entry.name) in (None, *layers)}


def test_one_layer_of_a_hubs_model_is_judged_with_the_shards_of_that_layer_only(
    hub: Any, process: Any, toy: Path, golden: Path, tmp_path: Path
) -> None:
    hub.add("owner/toy", toy)
    layer = ("single-layer", "--layer", 0, "--golden", golden, "--json")
    done = process(
        *layer, "--model", "owner/toy", "--backend", "cpu", HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "pass"
    fetched = {one.file for one in hub.asked("GET") if one.file.endswith(".safetensors")}
    assert fetched == _shards_of(toy, 0)
    assert fetched < {path.name for path in toy.glob("*.safetensors")}


def test_a_layer_that_the_model_lacks_is_refused_before_a_shard_is_fetched(
    hub: Any, process: Any, toy: Path, golden: Path, tmp_path: Path
) -> None:
    hub.add("owner/toy", toy)
    done = process(
        *("single-layer", "--layer", 99, "--golden", golden, "--model", "owner/toy"),
        **{"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "layer 99 is out of range" in done.stderr
    assert not [one for one in hub.asked("GET") if one.file.endswith(".safetensors")]


@pytest.fixture
def part(toy: Path, tmp_path: Path) -> Path:
    """A folder with the shards of layer 3, and of what belongs to no layer."""
    folder = tmp_path / "part"
    folder.mkdir()
    for name in ("config.json", INDEX_FILE, *_shards_of(toy, 3)):
        shutil.copy(toy / name, folder / name)
    with pytest.raises(Exception, match="is missing"):
        TensorIndex.from_folder(folder)
    return folder


def test_a_layer_of_a_partial_folder_is_judged_against_the_whole_models_golden(
    run: Any, part: Path, golden: Path
) -> None:
    result = run("single-layer", "--layer", 3, "--model", part, "--golden", golden, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["verdict"] == "pass"


def test_a_run_that_needs_absent_shards_names_them(run: Any, part: Path, toy: Path, golden: Path) -> None:
    (absent, *_) = sorted(_shards_of(toy, 0) - _shards_of(toy, 3))
    result = run("sweep", "--model", part, "--golden", golden)
    assert result.exit_code == 3
    assert f"shard {absent} is missing" in result.stderr


def test_without_a_golden_the_layers_before_are_needed_too(run: Any, part: Path) -> None:
    result = run("single-layer", "--layer", 3, "--model", part, "--seq-len", 5)
    assert result.exit_code == 3
    assert "is missing" in result.stderr
    assert run("single-layer", "--layer", 3, "--model", part, "--random-input").exit_code == 0

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


@pytest.fixture(scope="module")
def from_hub(
    serve: Any, hub_module: Any, toy: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[dict[str, Any], set[str]]]:
    """Runs of layers of a hub's models, in one process: by layer the result, and the shards that were fetched."""
    models, home = {99: "owner/first", 0: "owner/second"}, tmp_path_factory.mktemp("home")
    common = ("--golden", golden, "--backend", "cpu", "--captures", home, "--json")
    with hub_module.HubServer() as hub:
        for model in models.values():
            hub.add(model, toy)
        runs = [
            ("single-layer", "--layer", layer, "--model", model, *common) for layer, model in models.items()
        ]
        results = serve(runs, HF_ENDPOINT=hub.endpoint, HF_HOME=str(home))
        log = hub.log
    # Where a shard comes from does not name its model: the first request for the second model ends the first run's.
    second = next(number for number, one in enumerate(log) if models[0] in one.path)
    fetched = [{one.file for one in part if one.method == "GET"} for part in (log[:second], log[second:])]
    shards = [{name for name in names if name.endswith(".safetensors")} for names in fetched]
    return dict(zip(models, zip(results, shards, strict=True), strict=True))


def test_one_layer_of_a_hubs_model_is_judged_with_the_shards_of_that_layer_only(
    from_hub: Any, toy: Path
) -> None:
    done, fetched = from_hub[0]
    assert done["exit_code"] == 0, done["stderr"]
    assert json.loads(done["stdout"])["verdict"] == "pass"
    assert fetched == _shards_of(toy, 0)
    assert fetched < {path.name for path in toy.glob("*.safetensors")}


def test_a_layer_that_the_model_lacks_is_refused_before_a_shard_is_fetched(from_hub: Any) -> None:
    done, fetched = from_hub[99]
    assert done["exit_code"] == 2
    assert "layer 99 is out of range" in json.loads(done["stdout"])["error"]
    assert fetched == set()


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

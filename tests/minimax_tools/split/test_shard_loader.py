from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.hub.access import HubAccess
from minimax_tools.model.architecture import PART_EMBEDDING, PART_HEAD, PART_NORM, ParamMapper, part_of
from minimax_tools.split.part_loading import ShardLoader

NUM_LAYERS = 4
KINDS = pytest.mark.parametrize("kind", ["safetensors", "bin"])
NOWHERE = "http://127.0.0.1:9"

Saved = Callable[..., Path]


@pytest.fixture
def saved(make: Callable[..., Any]) -> Saved:
    """Folders of tiny models, as transformers saves them or as `.bin`; each made once, so left as they are."""

    def save(model_type: str, kind: str = "safetensors", *, size: str = "12KB") -> Path:
        folder: Path = make(model_type, pickled=kind == "bin", shard_size=size).folder
        return folder

    return save


@pytest.fixture
def copied(saved: Saved, tmp_path: Path) -> Saved:
    """Copies of such folders, to be spoilt."""
    return lambda *kind: Path(shutil.copytree(saved(*kind), tmp_path / "model"))


def load_part(folder: Path, names: set[str], shards: set[str]) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in ShardLoader.download_shards_if_needed(folder, shards).values():
        tensors.update(ShardLoader.load_shard_partial(path, names.__contains__))
    return tensors


def num_bytes_read_by(action: Callable[[], object]) -> int:
    """Bytes that this process read from files meanwhile, as the kernel counts them."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    idle = -count() + count()
    before = count()
    action()
    return count() - before - idle


@KINDS
@pytest.mark.parametrize(("model_type", "is_tied"), [("minimax_m2", False), ("qwen2", True), ("gpt2", True)])
def test_shards_of_a_component_hold_its_tensors(
    model_type: str, is_tied: bool, kind: str, saved: Saved
) -> None:
    folder = saved(model_type, kind)
    assert ShardLoader.is_sharded_model(folder)
    index = ShardLoader.load_index_json(folder)
    weight_map = index["weight_map"]
    ends = {"include_final_norm": True, "include_lm_head": True}
    parts: dict[str, tuple[tuple[int, int], set[int | str], dict[str, bool]]] = {
        "bottom": ((0, 1), {0, PART_EMBEDDING}, {"include_embedding": True}),
        "trunk": ((1, 3), {1, 2}, {}),
        "top": ((3, NUM_LAYERS), {3, PART_NORM, PART_HEAD}, ends),
    }
    for name, (layers, held, flags) in parts.items():
        shards = ShardLoader.get_required_shards_for_component(index, name, layers, model_type, **flags)
        names = {tensor for tensor in weight_map if part_of(tensor, model_type) in held}
        if is_tied and name == "top":
            names |= {tensor for tensor in weight_map if ParamMapper.is_token_embedding(tensor, model_type)}
        assert shards == {weight_map[tensor] for tensor in names} < set(weight_map.values())
        assert load_part(folder, names, shards).keys() == names


@KINDS
def test_model_in_one_file_is_not_sharded_and_gets_an_index_from_its_header(kind: str, saved: Saved) -> None:
    folder = saved("qwen2", kind, size="1GB")
    assert not ShardLoader.is_sharded_model(folder)
    index = ShardLoader.load_index_json(folder)
    (file,) = set(index["weight_map"].values())
    assert file == ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin")
    expected = load_file(saved("qwen2", size="1GB") / "model.safetensors")
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


@KINDS
def test_shards_without_an_index_get_one_from_their_headers(kind: str, copied: Saved) -> None:
    folder = copied("llama", kind)
    (index_path,) = folder.glob("*.index.json")
    expected = json.loads(index_path.read_text())["weight_map"]
    index_path.unlink()
    assert ShardLoader.is_sharded_model(folder)
    assert ShardLoader.load_index_json(folder)["weight_map"] == expected


@pytest.mark.parametrize(
    ("files", "is_sharded"),
    [
        (["model.safetensors"], False),
        (["model.safetensors", "consolidated.safetensors", "pytorch_model.bin.index.json"], False),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], True),
        (["model-00001-of-00002.safetensors"], True),
        (["model-00001-of-00001.safetensors"], False),
        (["model.safetensors.index.json"], True),
        (["model.safetensors.index.json", "pytorch_model.bin"], False),
        (["pytorch_model.bin", "training_args.bin", "optimizer.bin"], False),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"], True),
        (["pytorch_model.bin.index.json"], True),
    ],
)
def test_sharded_is_told_by_the_files_that_are_there(
    files: list[str], is_sharded: bool, tmp_path: Path
) -> None:
    for file in ["config.json", "README.md", *files]:
        (tmp_path / file).touch()
    assert ShardLoader.is_sharded_model(tmp_path) is is_sharded


@pytest.mark.parametrize("files", [[], ["training_args.bin"], ["model.gguf"], ["onnx/model.safetensors"]])
def test_folder_without_weights_is_an_error_and_not_unsharded(files: list[str], tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    for ask in (ShardLoader.is_sharded_model, ShardLoader.load_index_json):
        with pytest.raises(CheckpointError, match=f"no weights at .*{files[0] if files else 'no files'}"):
            ask(tmp_path)


def test_hub_that_does_not_answer_is_an_error_and_not_unsharded(tmp_path: Path) -> None:
    access = HubAccess(endpoint=NOWHERE, cache_dir=tmp_path, num_attempts=1, first_delay_s=0, timeout_s=2)
    for ask in (ShardLoader.is_sharded_model, ShardLoader.load_index_json):
        with pytest.raises(CheckpointError, match="some-owner/some-model"):
            ask("some-owner/some-model", access=access)
    with pytest.raises(CheckpointError, match="some-owner/some-model"):
        ShardLoader.download_shards_if_needed("some-owner/some-model", ["model.safetensors"], access=access)


def test_hub_id_is_loaded_like_a_folder(hub: Any, access: HubAccess, saved: Saved) -> None:
    hub.add("owner/tiny", saved("qwen2"))
    assert ShardLoader.is_sharded_model("owner/tiny", access=access)
    index = ShardLoader.load_index_json("owner/tiny", access=access)
    assert index == ShardLoader.load_index_json(saved("qwen2"))
    shards = ShardLoader.get_required_shards_for_component(index, "trunk", (1, 2), "qwen2")
    paths = ShardLoader.download_shards_if_needed("owner/tiny", shards, access=access)
    assert paths.keys() == shards
    assert all(path.is_file() for path in paths.values())


@pytest.mark.parametrize(
    ("layers", "flags", "missing"),
    [
        ((3, 6), {}, "nothing of layer 4; layer 5"),
        ((0, 1), {"include_embedding": True}, "nothing of embedding"),
        ((0, 1), {"include_final_norm": True}, "nothing of final norm"),
        ((0, 1), {"include_lm_head": True}, "nothing of lm_head"),
    ],
)
def test_part_that_the_checkpoint_lacks_is_named(
    layers: tuple[int, int], flags: dict[str, bool], missing: str
) -> None:
    index = index_of(4)
    with pytest.raises(CheckpointError, match=missing):
        ShardLoader.get_required_shards_for_component(index, "bottom", layers, "llama", **flags)


def index_of(num_layers: int) -> dict[str, Any]:
    """A file for each layer."""
    names = {f"model.layers.{layer}.mlp.up_proj.weight": f"{layer}.bin" for layer in range(num_layers)}
    return {"weight_map": names}


def test_layer_1_does_not_bring_the_files_of_layer_10() -> None:
    shards = ShardLoader.get_required_shards_for_component(index_of(20), "trunk", (1, 2), "llama")
    assert shards == {"1.bin"}


@pytest.mark.parametrize(
    ("component", "layers", "model_type", "error", "message"),
    [
        ("middle", (0, 1), "llama", ValueError, "component is 'middle', expected one of bottom, trunk, top"),
        ("trunk", (2, 1), "llama", ValueError, "expected 0 <= first <= end"),
        ("trunk", (-1, 1), "llama", ValueError, "expected 0 <= first <= end"),
        ("trunk", (0, 1), "t5", UsageError, "model_type 't5'.*one of minimax_m2, .*llama"),
    ],
)
def test_bad_argument_is_named(
    component: str, layers: tuple[int, int], model_type: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ShardLoader.get_required_shards_for_component(index_of(1), component, layers, model_type)


@KINDS
def test_only_the_wanted_bytes_of_a_shard_are_read(kind: str, tmp_path: Path) -> None:
    tensors = {f"model.layers.{layer}.weight": torch.randn(512, 512) for layer in range(6)}
    path = tmp_path / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin")
    if kind == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    # So that nothing is imported while bytes are counted.
    ShardLoader.load_shard_partial(path, lambda _: False)
    found: dict[str, torch.Tensor] = {}
    wanted = "model.layers.4.weight"
    num_bytes = num_bytes_read_by(lambda: found.update(ShardLoader.load_shard_partial(path, wanted.__eq__)))
    assert list(found) == [wanted]
    assert torch.equal(found[wanted], tensors[wanted])
    size_bytes = tensors[wanted].nbytes
    # The header aside; of a zip its directory too.
    assert size_bytes <= num_bytes <= size_bytes + 48_000


def test_all_missing_shards_are_named(copied: Saved) -> None:
    folder = copied("llama")
    gone = sorted(folder.glob("*.safetensors"))[:2]
    for path in gone:
        path.unlink()
    # The index is still of use: who needs none of the missing files misses nothing.
    index = ShardLoader.load_index_json(folder)
    with pytest.raises(CheckpointError, match=f"lacks {gone[0].name}, {gone[1].name}"):
        ShardLoader.download_shards_if_needed(folder, set(index["weight_map"].values()))


@KINDS
def test_index_that_contradicts_a_header_is_refused(kind: str, copied: Saved) -> None:
    folder = copied("llama", kind)
    (index_path,) = folder.glob("*.index.json")
    content = json.loads(index_path.read_text())
    first, second = sorted(set(content["weight_map"].values()))[:2]
    moved = next(name for name, file in content["weight_map"].items() if file == first)
    content["weight_map"][moved] = second
    index_path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"holds {moved}, the index places it in .*places {moved} in"):
        ShardLoader.load_index_json(folder)


@KINDS
def test_damaged_shard_is_named_with_its_fault(kind: str, copied: Saved) -> None:
    folder = copied("llama", kind)
    (shard, *_) = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"1 fault: found .*/{shard.name} is damaged"):
        ShardLoader.load_index_json(folder)
    with pytest.raises(CheckpointError, match="damaged"):
        ShardLoader.load_shard_partial(shard, lambda name: True)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"not a shard that mm2 can read.*found \.gguf"):
        ShardLoader.load_shard_partial(tmp_path / "model.gguf", lambda name: True)

from __future__ import annotations

import dataclasses
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubAccess
from minimax_tools.slices.source import open_source

MODEL = "owner/toy"


@pytest.fixture
def access(access: HubAccess, hub: Any, toy: Path) -> HubAccess:
    hub.add(MODEL, toy)
    return access


@pytest.fixture
def files(toy: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in toy.iterdir()}


def asked_bytes(hub: Any) -> int:
    ranges = [request.range for request in hub.asked("GET", ".safetensors")]
    bounds = [text.removeprefix("bytes=").split("-") for text in ranges]
    return sum(int(stop) - int(start) + 1 for start, stop in bounds)


def test_headers_of_a_hub_tell_every_tensor_and_place_before_any_download(
    toy: Path, hub: Any, access: HubAccess
) -> None:
    source = open_source(MODEL, headers=True, access=access)
    here = TensorIndex.from_folder(toy).entries
    assert source.entries is not None
    for name, entry in source.entries.items():
        assert dataclasses.replace(entry, file=toy / entry.file.name) == here[name]
    assert source.entries.keys() == here.keys()
    num_shards = len(list(toy.glob("*.safetensors")))
    assert len(hub.asked("GET", ".safetensors")) == 2 * num_shards
    data_bytes = sum(entry.size_bytes for entry in here.values())
    assert asked_bytes(hub) == sum(path.stat().st_size for path in toy.glob("*.safetensors")) - data_bytes
    assert not list(source.folder.glob("*.safetensors"))
    with pytest.raises(CheckpointError, match=r"has no weights here.*mm2-split fetch"):
        _ = source.headers


def test_config_alone_is_used_where_headers_are_not_asked_for_or_cannot_come(
    toy: Path, hub: Any, access: HubAccess
) -> None:
    names = set(TensorIndex.from_folder(toy).names)
    unasked = open_source(MODEL, access=access)
    assert not hub.asked("GET", ".safetensors")
    hub.plant("GET", "/content/", ignores_range=True, times=99)
    without_ranges = open_source(MODEL, headers=True, access=access)
    hub.forget()
    offline = open_source(MODEL, headers=True, access=dataclasses.replace(access, is_offline=True))
    assert not hub.log
    for source in (unasked, without_ranges, offline):
        assert source.entries is None
        assert {tensor.name for tensor in source.tensors} == names


@pytest.mark.parametrize("path", ["/content/", "/api/models/"])
def test_a_network_error_is_never_not_there(path: str, hub: Any, access: HubAccess) -> None:
    access = dataclasses.replace(access, num_attempts=2)
    open_source(MODEL, access=access)
    hub.plant("GET", path, status=503, times=999)
    with pytest.raises(CheckpointError, match="does not answer, or breaks off"):
        open_source(MODEL, headers=True, access=access)


def test_a_damaged_header_on_the_hub_is_named(files: dict[str, bytes], hub: Any, access: HubAccess) -> None:
    shard = sorted(name for name in files if name.endswith(".safetensors"))[1]
    files[shard] = struct.pack("<Q", 1 << 40) + files[shard][8:]
    hub.add(MODEL, files)
    with pytest.raises(CheckpointError, match=rf"{shard} is damaged.*a header of 1099511627776 bytes"):
        open_source(MODEL, headers=True, access=access)


def test_a_hub_whose_index_contradicts_its_headers_is_refused(
    files: dict[str, bytes], hub: Any, access: HubAccess
) -> None:
    index = "model.safetensors.index.json"
    files[index] = files[index].replace(b'"model.norm.weight"', b'"model.norm.wait"')
    hub.add(MODEL, files)
    with pytest.raises(CheckpointError, match=r"model\.norm\.wait"):
        open_source(MODEL, headers=True, access=access)


def test_a_header_as_long_as_its_file_is_not_fetched(hub: Any, access: HubAccess) -> None:
    shard = struct.pack("<Q", 100_000_001) + bytes(100_000_001)
    hub.add(MODEL, {"config.json": b'{"model_type": "minimax_m2"}', "model.safetensors": shard})
    fault = "expected a header of at most 100000000 bytes, found one of 100000001"
    with pytest.raises(CheckpointError, match=fault):
        open_source(MODEL, headers=True, access=access)
    assert asked_bytes(hub) == 8


def test_a_hubs_model_bears_the_name_of_its_commit_and_a_folder_its_own(
    toy: Path, hub: Any, access: HubAccess
) -> None:
    pinned = f"{MODEL}@{hub.add(MODEL, toy).commit}"
    for model in (MODEL, f"{MODEL}@main", pinned):
        assert open_source(model, access=access).model == pinned
    assert open_source(MODEL, access=dataclasses.replace(access, is_offline=True)).model == pinned
    assert open_source(str(toy)).model == str(toy)


def test_tensors_that_nothing_tells_are_an_error_that_names_the_shards(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "llama")
    (folder / "model-00003-of-00007.safetensors").unlink()
    source = open_source(str(folder))
    assert source.entries is None
    assert source.names == frozenset(TensorIndex.from_folder(llama).names)
    with pytest.raises(CheckpointError, match=r"the config.json of a llama lists none.*model-00003-of-00007"):
        _ = source.tensors
    for path in folder.glob("model*"):
        path.unlink()
    source = open_source(str(folder))
    assert source.names is None
    with pytest.raises(CheckpointError, match="found no header"):
        _ = source.tensors


def test_a_folder_that_lacks_a_shard_tells_what_is_here(toy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(toy, tmp_path / "toy")
    shard = sorted(folder.glob("*.safetensors"))[-1]
    lost = [
        entry.name for entry in TensorIndex.from_folder(toy).entries.values() if entry.file.name == shard.name
    ]
    shard.unlink()
    source = open_source(str(folder))
    assert source.entries is None
    assert len(source.tensors) == 827
    with pytest.raises(CheckpointError, match=f"its shard {shard.name} is not in"):
        _ = source.headers[lost[0]]

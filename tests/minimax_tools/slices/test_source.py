from __future__ import annotations

import dataclasses
import shutil
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubAccess
from minimax_tools.slices.source import open_source

MODEL = "owner/toy"


@pytest.fixture
def access(hub: Any, toy: Path, tmp_path: Path) -> HubAccess:
    hub.add(MODEL, toy)
    return HubAccess(endpoint=hub.endpoint, cache_dir=tmp_path / "cache", first_delay_s=0.01, timeout_s=60)


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
    found = {
        name: dataclasses.replace(entry, file=toy / entry.file.name) for name, entry in source.entries.items()
    }
    assert found == dict(here)
    num_shards = len(list(toy.glob("*.safetensors")))
    assert len(hub.asked("GET", ".safetensors")) == 2 * num_shards
    data_bytes = sum(entry.size_bytes for entry in here.values())
    assert asked_bytes(hub) == sum(path.stat().st_size for path in toy.glob("*.safetensors")) - data_bytes
    assert not list(source.folder.glob("*.safetensors"))
    with pytest.raises(CheckpointError, match=r"has no weights here.*mm2-split fetch"):
        _ = source.headers


def test_without_being_asked_for_headers_nothing_of_the_shards_is_read(hub: Any, access: HubAccess) -> None:
    source = open_source(MODEL, access=access)
    assert source.entries is None
    assert not hub.asked("GET", ".safetensors")
    assert len(source.tensors) == 827


def test_a_server_without_ranges_leaves_config_alone(
    toy: Path, hub: Any, hub_module: ModuleType, access: HubAccess
) -> None:
    hub.plant("GET", "/content/", hub_module.Fault(ignores_range=True), times=99)
    source = open_source(MODEL, headers=True, access=access)
    assert source.entries is None
    assert {tensor.name for tensor in source.tensors} == set(TensorIndex.from_folder(toy).names)


def test_a_network_error_is_never_not_there(hub: Any, hub_module: ModuleType, access: HubAccess) -> None:
    open_source(MODEL, access=access)
    hub.plant("GET", "/content/", hub_module.Fault(status=503), times=999)
    with pytest.raises(CheckpointError, match="does not answer, or breaks off"):
        open_source(MODEL, headers=True, access=access)


def test_a_hub_that_went_away_is_an_error_and_not_config_alone(
    hub: Any, hub_module: ModuleType, access: HubAccess
) -> None:
    open_source(MODEL, access=access)
    hub.plant("GET", "/api/models/", hub_module.Fault(status=503), times=999)
    with pytest.raises(CheckpointError, match="does not answer, or breaks off"):
        open_source(MODEL, headers=True, access=access)


def test_offline_config_alone_is_used(hub: Any, access: HubAccess) -> None:
    open_source(MODEL, access=access)
    hub.forget()
    source = open_source(MODEL, headers=True, access=dataclasses.replace(access, is_offline=True))
    assert source.entries is None
    assert len(source.tensors) == 827
    assert not hub.log


def test_a_damaged_header_on_the_hub_is_named(toy: Path, hub: Any, access: HubAccess) -> None:
    files = {path.name: path.read_bytes() for path in toy.iterdir()}
    shard = sorted(name for name in files if name.endswith(".safetensors"))[1]
    files[shard] = struct.pack("<Q", 1 << 40) + files[shard][8:]
    hub.add(MODEL, files)
    with pytest.raises(CheckpointError, match=rf"{shard} is damaged.*a header of 1099511627776 bytes"):
        open_source(MODEL, headers=True, access=access)


def test_a_hub_whose_index_contradicts_its_headers_is_refused(toy: Path, hub: Any, access: HubAccess) -> None:
    files = {path.name: path.read_bytes() for path in toy.iterdir()}
    index = "model.safetensors.index.json"
    files[index] = files[index].replace(b'"model.norm.weight"', b'"model.norm.wait"')
    hub.add(MODEL, files)
    with pytest.raises(CheckpointError, match=r"model\.norm\.wait"):
        open_source(MODEL, headers=True, access=access)


def test_a_header_as_long_as_its_file_is_not_fetched(hub: Any, access: HubAccess) -> None:
    shard = struct.pack("<Q", 100_000_001) + bytes(100_000_001)
    hub.add(MODEL, {"config.json": b'{"model_type": "minimax_m2"}', "model.safetensors": shard})
    with pytest.raises(
        CheckpointError, match="expected a header of at most 100000000 bytes, found one of 100000001"
    ):
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

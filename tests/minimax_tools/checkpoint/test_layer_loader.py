from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.checkpoint.layer_loader import LayerLoader, LayerStorage, grouped_storage, packed_storage
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expert_weight, layer_prefix

CPU = torch.device("cpu")
NewStorage = Callable[[int], LayerStorage]


@pytest.fixture
def reader(toy: Path) -> Iterator[CheckpointReader]:
    with CheckpointReader(toy) as reader:
        yield reader


@pytest.fixture
def spec(toy: Path) -> ModelSpec:
    return ModelSpec.from_folder(toy)


@pytest.fixture
def new_storage(spec: ModelSpec) -> NewStorage:
    return partial(grouped_storage, spec, dtype=torch.bfloat16, device=CPU)


@pytest.fixture
def damaged(toy: Path, tmp_path: Path) -> Path:
    """The toy, to be damaged."""
    return shutil.copytree(toy, tmp_path / "damaged")


def assert_holds(storage: LayerStorage, reader: CheckpointReader, spec: ModelSpec, layer: int) -> None:
    tensors = LayerTensors.open(reader, spec, layer, torch.bfloat16)
    for name, expected in tensors.items():
        assert torch.equal(storage.weights[name], expected), name


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mm2-reading")]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("prefetch", [False, True])
def test_every_layer_is_loaded_whole(
    reader: CheckpointReader, spec: ModelSpec, new_storage: NewStorage, prefetch: bool, num_threads: int
) -> None:
    with LayerLoader(reader, new_storage, prefetch=prefetch, num_threads=num_threads) as loader:
        for layer in range(4):
            storage = loader.load(layer, then=layer + 1 if layer < 3 else None)
            assert loader.current is storage
            assert_holds(storage, reader, spec, layer)


@pytest.fixture
def made(new_storage: NewStorage) -> tuple[list[Any], NewStorage]:
    """References to the storages so far, and a function that makes one more."""
    references: list[Any] = []

    def make(layer: int) -> LayerStorage:
        storage = new_storage(layer)
        references.append(weakref.ref(storage))
        return storage

    return references, make


@pytest.mark.parametrize(("prefetch", "num_storages"), [(False, 1), (True, 2)])
def test_storage_is_made_once_filled_again_and_not_held_in_the_end(
    reader: CheckpointReader, made: tuple[list[Any], NewStorage], prefetch: bool, num_storages: int
) -> None:
    references, make = made
    with LayerLoader(reader, make, prefetch=prefetch, num_threads=2) as loader:
        for layer in range(4):
            loader.load(layer, then=layer + 1 if layer < 3 else None)
        assert len(references) == num_storages
        loader.release()
        loader.load(0, then=1)
        assert len(references) == 2 * num_storages
    assert [reference() for reference in references] == [None] * (2 * num_storages)


def test_prefetched_layer_is_not_read_again(reader: CheckpointReader, new_storage: NewStorage) -> None:
    def size(layer: int) -> int:
        return sum(reader.index[name].size_bytes for name in reader.index.layer_names(layer))

    with LayerLoader(reader, new_storage, prefetch=True, num_threads=2) as loader:
        loader.load(0, then=1)
        loader.load(1)
        assert reader.num_bytes_read == size(0) + size(1)


def test_layer_that_was_not_announced_is_loaded_all_the_same(
    reader: CheckpointReader, spec: ModelSpec, new_storage: NewStorage
) -> None:
    with LayerLoader(reader, new_storage, prefetch=True, num_threads=2) as loader:
        loader.load(0, then=1)
        assert_holds(loader.load(3), reader, spec, 3)
        loader.load(0, then=1)
        loader.load_without_experts(2)
        loader.load_experts(range(32))
        assert_holds(loader.current, reader, spec, 2)


@pytest.mark.parametrize("packed", [False, True])
def test_asked_for_experts_alone_are_read(
    reader: CheckpointReader, spec: ModelSpec, new_storage: NewStorage, packed: bool
) -> None:
    make = partial(packed_storage, spec, dtype=torch.bfloat16, device=CPU) if packed else new_storage
    names = reader.index.layer_names(1)
    parts = ("experts.3.", "experts.30.")
    expected = sum(
        reader.index[name].size_bytes
        for name in names
        if ".experts." not in name or any(part in name for part in parts)
    )
    with LayerLoader(reader, make, prefetch=False, num_threads=2) as loader:
        storage = loader.load_without_experts(1)
        loader.load_experts([3, 30])
        assert reader.num_bytes_read == expected
        tensors = LayerTensors.open(reader, spec, 1, torch.bfloat16)
        for name, tensor in tensors.items():
            if ".experts." not in name or any(part in name for part in parts):
                assert torch.equal(storage.weights[name], tensor), name


@pytest.mark.parametrize("prefetch", [False, True])
def test_damaged_tensor_is_named_and_other_layers_load_after_it(
    damaged: Path, spec: ModelSpec, new_storage: NewStorage, prefetch: bool
) -> None:
    with CheckpointReader(damaged) as reader:
        entry = reader.index[layer_prefix(2) + expert_weight(31, "w3")]
        whole = entry.file.read_bytes()
        with LayerLoader(reader, new_storage, prefetch=prefetch, num_threads=2) as loader:
            os.truncate(entry.file, entry.offset + 7)
            loader.load(1, then=2)
            # What is in memory is not hurt by what is not.
            with pytest.raises(CheckpointError, match="layers.2.*cannot be read from .*file ends after"):
                loader.load(2, then=3)
            assert_holds(loader.load(0), reader, spec, 0)
            entry.file.write_bytes(whole)
            assert_holds(loader.load(2), reader, spec, 2)
        assert reading_threads() == []


def test_failed_load_leaves_no_third_storage_behind(
    damaged: Path, made: tuple[list[Any], NewStorage]
) -> None:
    references, make = made
    with CheckpointReader(damaged) as reader:
        entry = reader.index[layer_prefix(2) + expert_weight(31, "w3")]
        os.truncate(entry.file, entry.offset + 7)
        with LayerLoader(reader, make, prefetch=True, num_threads=2) as loader:
            for _ in range(3):
                loader.load(1, then=2)
                with pytest.raises(CheckpointError):
                    loader.load(2)
    assert len(references) == 2


def test_threads_end_with_the_block_whatever_ends_it(
    reader: CheckpointReader, new_storage: NewStorage
) -> None:
    def load_and_stop() -> None:
        with LayerLoader(reader, new_storage, prefetch=True, num_threads=2) as loader:
            loader.load(0, then=1)
            assert reading_threads()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_and_stop()
    assert reading_threads() == []

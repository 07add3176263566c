"""A layer's storage holds what the checkpoint holds, and experts lie in places by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_loader import (
    PACKED_DTYPE,
    LayerStorage,
    PackedMatrices,
    down_places,
    gate_up_places,
    grouped_storage,
    packed_storage,
)
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FLOAT32_NAMES, expert_weight, layer_prefix

CPU = torch.device("cpu")
KINDS = {"grouped": grouped_storage, "packed": packed_storage}


@pytest.fixture
def reader(fp8_tensors: Any, write: Any) -> Any:
    with CheckpointReader(write(fp8_tensors)) as reader:
        yield reader


def filled(kind: Any, spec: ModelSpec, reader: CheckpointReader, dtype: torch.dtype) -> LayerStorage:
    storage: LayerStorage = kind(spec, dtype=dtype, device=CPU)
    for name, place in storage.places.items():
        if place.dtype == PACKED_DTYPE:
            reader.read_into(layer_prefix(1) + name, place)
        else:
            reader.read_weight_into(layer_prefix(1) + name, place)
    return storage


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_weights_are_those_of_the_checkpoint(
    spec: ModelSpec, reader: CheckpointReader, kind: Any, dtype: torch.dtype
) -> None:
    storage, tensors = filled(kind, spec, reader, dtype), LayerTensors.open(reader, spec, 1, dtype)
    assert set(storage.weights) == set(tensors)
    assert len(storage.weights) == len(tensors)
    for name, expected in tensors.items():
        found = storage.weights[name]
        assert found.dtype == (torch.float32 if name in FLOAT32_NAMES else dtype), name
        assert torch.equal(found, expected), name


def test_grouped_modules_hold_gate_rows_and_then_up_rows(spec: ModelSpec, reader: CheckpointReader) -> None:
    storage = filled(grouped_storage, spec, reader, torch.bfloat16)
    gate_up, down = (storage.modules[f"mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    assert isinstance(gate_up, torch.Tensor)
    assert gate_up.shape == (4, 2 * 72, 160)
    for expert in range(4):
        parts = [storage.weights[expert_weight(expert, name)] for name in ("w1", "w3")]
        assert torch.equal(gate_up[expert], torch.cat(parts))
        assert torch.equal(down[expert], storage.weights[expert_weight(expert, "w2")])


def test_packed_matrices_are_the_grouped_ones_at_each_access(
    spec: ModelSpec, reader: CheckpointReader
) -> None:
    grouped = filled(grouped_storage, spec, reader, torch.bfloat16).modules
    packed = filled(packed_storage, spec, reader, torch.bfloat16).modules
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        matrices = packed[name]
        assert isinstance(matrices, PackedMatrices)
        assert len(matrices) == 4
        for expert in (3, 0, 2, 1):
            assert torch.equal(matrices[expert], grouped[name][expert])
            # transformers' loop asks with a tensor of no dims.
            assert torch.equal(matrices[torch.tensor(expert)], grouped[name][expert])


def test_packed_access_is_good_until_the_next_one(spec: ModelSpec, reader: CheckpointReader) -> None:
    matrices = filled(packed_storage, spec, reader, torch.bfloat16).modules["mlp.experts.down_proj"]
    first = matrices[0]
    kept = first.clone()
    assert matrices[1].data_ptr() == first.data_ptr()
    assert not torch.equal(first, kept)


def test_packed_experts_take_a_byte_a_weight_and_their_scales(spec: ModelSpec) -> None:
    places = packed_storage(spec, dtype=torch.bfloat16, device=CPU).places
    experts = {name: place for name, place in places.items() if ".experts." in name}
    assert {place.dtype for place in experts.values()} == {torch.float8_e4m3fn, torch.float32}
    scales = sum(place.numel() for place in experts.values() if place.dtype == torch.float32)
    # Ragged blocks: 72 × 160 takes 1 × 2 of them, and 160 × 72 takes 2 × 1.
    assert scales == 4 * 3 * 2
    assert sum(place.nbytes for place in experts.values()) == 4 * 3 * 72 * 160 + 4 * scales


@pytest.mark.parametrize("places", [gate_up_places, down_places])
@pytest.mark.parametrize(
    ("storage", "fault"),
    [
        (torch.zeros(2, 4, 5), "the storage is torch.float32, expected torch.bfloat16"),
        (torch.zeros(2, 4).bfloat16(), r"the storage is \[2, 4\], expected 3 dims, 2 experts first"),
        (torch.zeros(3, 4, 5).bfloat16(), r"the storage is \[3, 4, 5\], expected 3 dims, 2 experts first"),
    ],
)
def test_storage_of_another_kind_is_refused(places: Any, storage: torch.Tensor, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        places(range(2), storage, dtype=torch.bfloat16)


def test_gate_and_up_must_be_of_one_height() -> None:
    with pytest.raises(ValueError, match=r"storage is \[2, 3, 4\], expected gate and up rows of one height"):
        gate_up_places(range(2), torch.zeros(2, 3, 4), dtype=torch.float32)


Tensors = dict[str, torch.Tensor]
Writer = Callable[..., Path]

INTERMEDIATE, HIDDEN = 3, 5


def _experts(count: int) -> Tensors:
    """Experts whose every value tells expert and matrix, in the order of the file: 10 before 2."""
    tensors = {}
    for expert in sorted(range(count), key=str):
        for place, matrix in enumerate(("w1", "w2", "w3")):
            shape = (HIDDEN, INTERMEDIATE) if matrix == "w2" else (INTERMEDIATE, HIDDEN)
            tensors[expert_weight(expert, matrix)] = torch.full(shape, expert + place / 4)
    return tensors


def _storage(
    count: int, *, intermediate: int = INTERMEDIATE, hidden: int = HIDDEN
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.full((count, 2 * intermediate, hidden), -1.0).bfloat16()
    return gate_up, torch.full((count, hidden, intermediate), -1.0).bfloat16()


def _places(experts: range, gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        **gate_up_places(experts, gate_up, dtype=torch.bfloat16),
        **down_places(experts, down, dtype=torch.bfloat16),
    }


def _group(
    tensors: Mapping[str, torch.Tensor], experts: range, *, gate_up: torch.Tensor, down: torch.Tensor
) -> None:
    places = _places(experts, gate_up, down)
    layer = tensors if isinstance(tensors, LayerTensors) else _layer_of(tensors)
    with ReadingPool(2) as pool:
        pool.fill(places, layer.read_into).finish()


def _layer_of(tensors: Mapping[str, torch.Tensor]) -> LayerTensors:
    """A layer in which a port has set every tensor: none is left in the checkpoint."""
    unread: Any = None
    return LayerTensors(unread, layer=0, dtype=torch.bfloat16, stored={}, present=tensors)


def test_places_are_views_by_the_experts_names() -> None:
    gate_up, down = _storage(2)
    places = _places(range(3, 5), gate_up, down)
    names = {expert_weight(expert, matrix) for expert in (3, 4) for matrix in ("w1", "w2", "w3")}
    assert set(places) == names
    for number, place in enumerate(places.values()):
        place.fill_(number)
    assert (gate_up != -1).all()
    assert (down != -1).all()
    assert places[expert_weight(4, "w3")].data_ptr() == gate_up[1, INTERMEDIATE:].data_ptr()


def test_a_run_of_experts_starts_at_index_zero() -> None:
    gate_up, down = _storage(2)
    _group(_experts(12), range(9, 11), gate_up=gate_up, down=down)
    # By number, not as text, and gate before up.
    assert down[:, 0, 0].tolist() == [9.25, 10.25]
    assert gate_up[:, :: 2 * INTERMEDIATE - 1, 0].tolist() == [[9, 9.5], [10, 10.5]]


def test_a_checkpoints_layer_is_grouped_transposed_bit_for_bit(
    fp8_tensors: Tensors, write: Writer, spec: ModelSpec
) -> None:
    gate_up, down = _storage(4, intermediate=72, hidden=160)
    columns = [torch.full_like(rows.mT.contiguous(), -1.0) for rows in (gate_up, down)]
    with CheckpointReader(write(fp8_tensors)) as reader:
        layer = LayerTensors.open(reader, spec, 1, torch.bfloat16)
        _group(layer, range(4), gate_up=gate_up, down=down)
        _group(layer, range(4), gate_up=columns[0].mT, down=columns[1].mT)
        present = {name: layer[name] for name in layer}
        _group(present, range(4), gate_up=(again := torch.empty_like(columns[0])).mT, down=columns[1].mT)
    assert torch.equal(columns[0], gate_up.mT)
    assert torch.equal(columns[1], down.mT)
    assert torch.equal(again, columns[0])


@pytest.mark.parametrize(
    ("matrix", "value"),
    [
        ("w2", torch.ones(HIDDEN)),
        ("w3", torch.ones(HIDDEN, INTERMEDIATE)),
        ("w1", torch.ones(INTERMEDIATE, HIDDEN).to(torch.float8_e4m3fn)),
    ],
    ids=["would broadcast", "transposed", "fp8 codes"],
)
def test_a_weight_that_does_not_fit_or_is_not_there_is_named(matrix: str, value: torch.Tensor) -> None:
    gate_up, down = _storage(2)
    with pytest.raises(ValueError, match=r"experts\.1\.w"):
        _group({**_experts(2), expert_weight(1, matrix): value}, range(2), gate_up=gate_up, down=down)
    gate_up, down = _storage(3)
    with pytest.raises(KeyError, match=r"experts\.2\.w1"):
        _group(_experts(2), range(3), gate_up=gate_up, down=down)

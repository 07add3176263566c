"""Places of experts in grouped storage, and the values read into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_loader import down_places, gate_up_places
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expert_weight

Tensors = dict[str, torch.Tensor]
Writer = Callable[..., Path]

INTERMEDIATE, HIDDEN = 3, 5


def _experts(count: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """Experts whose every value tells expert and matrix, in the order of the file: 10 before 2."""
    tensors = {}
    for expert in sorted(range(count), key=str):
        for place, matrix in enumerate(("w1", "w2", "w3")):
            shape = (HIDDEN, INTERMEDIATE) if matrix == "w2" else (INTERMEDIATE, HIDDEN)
            tensors[expert_weight(expert, matrix)] = torch.full(shape, expert + place / 4, dtype=dtype)
    return tensors


def _storage(
    count: int, *, intermediate: int = INTERMEDIATE, hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.full((count, 2 * intermediate, hidden), -1.0, dtype=dtype)
    return gate_up, torch.full((count, hidden, intermediate), -1.0, dtype=dtype)


def _group(
    tensors: Mapping[str, torch.Tensor],
    experts: range,
    *,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    places = {
        **gate_up_places(experts, gate_up, dtype=dtype),
        **down_places(experts, down, dtype=dtype),
    }
    layer = tensors if isinstance(tensors, LayerTensors) else _layer_of(tensors)
    with ReadingPool(2) as pool:
        pool.fill(places, layer.read_into).finish()


def _layer_of(tensors: Mapping[str, torch.Tensor]) -> LayerTensors:
    """A layer in which a port has set every tensor: none is left in the checkpoint."""
    unread: Any = None
    return LayerTensors(unread, layer=0, dtype=torch.bfloat16, stored={}, present=tensors)


def test_experts_lie_in_integer_order_gate_before_up() -> None:
    gate_up, down = _storage(12)
    _group(_experts(12), range(12), gate_up=gate_up, down=down)
    for expert in range(12):
        assert (gate_up[expert, :INTERMEDIATE] == expert).all()
        assert (gate_up[expert, INTERMEDIATE:] == expert + 0.5).all()
        assert (down[expert] == expert + 0.25).all()


def test_places_are_views_by_the_experts_names() -> None:
    gate_up, down = _storage(2)
    places = {
        **gate_up_places(range(3, 5), gate_up, dtype=torch.bfloat16),
        **down_places(range(3, 5), down, dtype=torch.bfloat16),
    }
    assert set(places) == {
        expert_weight(expert, matrix) for expert in (3, 4) for matrix in ("w1", "w2", "w3")
    }
    for number, place in enumerate(places.values()):
        place.fill_(number)
    assert (gate_up != -1).all()
    assert (down != -1).all()
    assert places[expert_weight(4, "w3")].data_ptr() == gate_up[1, INTERMEDIATE:].data_ptr()


def test_a_run_of_experts_starts_at_index_zero() -> None:
    gate_up, down = _storage(2)
    _group(_experts(12), range(9, 11), gate_up=gate_up, down=down)
    assert down[:, 0, 0].tolist() == [9.25, 10.25]


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


def _with(name: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {**_experts(2), name: value}


@pytest.mark.parametrize(
    "tensors",
    [
        _with(expert_weight(1, "w2"), torch.ones(HIDDEN)),
        _with(expert_weight(1, "w3"), torch.ones(HIDDEN, INTERMEDIATE)),
        _with(expert_weight(1, "w1"), torch.ones(INTERMEDIATE, HIDDEN).to(torch.float8_e4m3fn)),
    ],
    ids=["would broadcast", "transposed", "fp8 codes"],
)
def test_a_weight_that_does_not_fit_is_named(tensors: Mapping[str, torch.Tensor]) -> None:
    gate_up, down = _storage(2)
    with pytest.raises(ValueError, match=r"experts\.1\.w"):
        _group(tensors, range(2), gate_up=gate_up, down=down)


def test_an_expert_that_is_not_there_is_named() -> None:
    gate_up, down = _storage(3)
    with pytest.raises(KeyError, match=r"experts\.2\.w1"):
        _group(_experts(2), range(3), gate_up=gate_up, down=down)

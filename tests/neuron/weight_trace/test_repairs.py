"""Repairs: their texts, and that each is worth its trial."""

from __future__ import annotations

import pytest
import torch

from minimax_tools.capture.manifest import WeightMistake
from minimax_tools.model.weight_names import K_PROJ
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.weight_trace.repairs import Repair, candidate_repairs
from neuron.weight_trace.source_tensors import SourceTensors, TensorOrigin
from neuron.weight_trace.tensor_layout import TensorLayout, read_layout

# Four heads of 32: q_proj [128,128] and o_proj are square, and so are the experts' matrices.
SPEC = SyntheticModel(
    hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=128
).spec()
SOURCES = SourceTensors.of(SPEC)


def layout_of(
    numbers: torch.Tensor, *, name: str = "weight", gain: float | None = 1.0, offset: float | None = 0.0
) -> TensorLayout:
    origin = TensorOrigin(
        name=name,
        shape=tuple(numbers.shape),
        dtype=torch.bfloat16,
        numbers=numbers,
        gain=gain,
        offset=offset,
        rounding=0.0,
        rounding_float32=0.0,
        constant=None,
    )
    return read_layout(origin, SOURCES)


def numbers_of(name: str) -> torch.Tensor:
    source = SOURCES.get(name)
    assert source is not None
    return torch.arange(source.start, source.start + source.size).reshape(source.shape)


def repairs_of(layouts: list[TensorLayout], mistake: WeightMistake) -> list[Repair]:
    return [repair for repair in candidate_repairs([layouts], SOURCES, SPEC) if repair.mistake is mistake]


@pytest.mark.parametrize(
    ("gain", "offset", "texts"),
    [
        (1.0, 0.0, []),
        (2.0, 0.0, ["k_proj is multiplied by 2"]),
        (2.0, 0.5, ["k_proj is multiplied by 2 and shifted by 0.5"]),
        (1.0, 0.5, ["k_proj is shifted by 0.5"]),
        # No single number undoes these.
        (None, 0.5, []),
        (2.0, None, []),
    ],
)
def test_a_scale_is_undone_if_all_elements_share_it(
    gain: float | None, offset: float | None, texts: list[str]
) -> None:
    layout = layout_of(numbers_of(K_PROJ), gain=gain, offset=offset)
    repairs = repairs_of([layout], WeightMistake.SCALED)
    assert [repair.text for repair in repairs] == texts
    for repair in repairs:
        changed = repair.apply({K_PROJ: torch.tensor([4.0])})[K_PROJ]
        assert changed.item() == (4.0 - (offset or 0.0)) / (gain or 1.0)


def test_a_square_matrix_is_transposed_once() -> None:
    repairs = repairs_of([], WeightMistake.TRANSPOSED)
    kinds = [repair.kinds for repair in repairs]
    assert ("q_proj",) in kinds
    assert len(set(kinds)) == len(kinds)


def test_a_reshaped_matrix_is_repaired_in_two_ways() -> None:
    keys = numbers_of(K_PROJ)
    repairs = repairs_of([layout_of(keys.T.reshape(keys.shape))], WeightMistake.TRANSPOSED)
    assert sum(repair.kinds == ("k_proj",) for repair in repairs) == 2

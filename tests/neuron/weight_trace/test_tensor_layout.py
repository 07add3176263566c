"""Layouts of tensors: each pattern has its text, disorder beside other tensors is found, repairs are worth trying."""

from __future__ import annotations

import pytest
import torch

from minimax_tools.capture.manifest import WeightMistake
from minimax_tools.model.weight_names import K_PROJ, Q_PROJ, V_PROJ
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.weight_trace.agreement import Scales
from neuron.weight_trace.layout_check import check_layouts
from neuron.weight_trace.repairs import Repair, candidate_repairs
from neuron.weight_trace.source_tensors import CONSTANT, SourceTensors, TensorOrigin
from neuron.weight_trace.tensor_layout import IndexSequence, TensorLayout, read_layout

# Four heads of 32: q_proj [128,128] and o_proj are square, and so are the experts' matrices.
SPEC = SyntheticModel(
    hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=128
).spec()
SOURCES = SourceTensors.of(SPEC, 0)


def layout_of(numbers: torch.Tensor, *, gain: float | None = 1.0, offset: float | None = 0.0) -> TensorLayout:
    origin = TensorOrigin(
        name="kv",
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


def test_tensors_side_by_side_are_in_order() -> None:
    keys, values = numbers_of(K_PROJ), numbers_of(V_PROJ)
    width = keys.shape[1]
    layout = layout_of(torch.cat((keys, values), 1))
    assert all(segment.is_in_order for segment in layout.segments)
    assert layout.text == f"columns 0–{width - 1} k_proj, columns {width}–{2 * width - 1} v_proj"


def test_each_of_four_blocks_has_its_columns_and_its_rows() -> None:
    keys, values = numbers_of(K_PROJ), numbers_of(V_PROJ)
    width, top = keys.shape[1], torch.cat((keys[:8], keys[8:12]))
    left, right = torch.cat((top, values[:4])), torch.cat((values[4:16], keys[12:16]))
    assert layout_of(torch.cat((left, right), 1)).text == (
        f"columns 0–{width - 1} rows 0–11 k_proj, its rows 0–11, "
        f"columns 0–{width - 1} rows 12–15 v_proj, its rows 0–3, "
        f"columns {width}–{2 * width - 1} rows 0–11 v_proj, its rows 4–15, "
        f"columns {width}–{2 * width - 1} rows 12–15 k_proj, its rows 12–15"
    )


def test_rows_with_padding_between_them_are_told_by_their_step() -> None:
    keys = numbers_of(K_PROJ)
    padded = torch.stack((keys, torch.full_like(keys, CONSTANT)), 1).flatten(0, 1)
    text = "one row in 2 from row 0: k_proj, one row in 2 from row 1: nothing of the checkpoint"
    assert layout_of(padded).text == text


def test_a_reshaped_tensor_beside_another_is_found() -> None:
    keys, values = numbers_of(K_PROJ), numbers_of(V_PROJ)
    layout = layout_of(torch.cat((keys.T.reshape(keys.shape), values), 1))
    (finding,) = [
        finding
        for finding in check_layouts([[layout]], SOURCES, SPEC, Scales.of([], SOURCES, SPEC))
        if finding.mistake is WeightMistake.TRANSPOSED
    ]
    where = f"columns 0–{keys.shape[1] - 1}"
    assert finding.text == f"kv: {where} rows torn: k_proj transposed, and reshaped back"


def test_groups_of_heads_continue_each_other() -> None:
    queries, keys = numbers_of(Q_PROJ), numbers_of(K_PROJ)
    layout = layout_of(torch.stack([torch.cat((queries[i : i + 8], keys[i : i + 4])) for i in (0, 8)]))
    assert "times the next" not in layout.text, "keys 4 to 7 are left out"
    groups = [torch.cat((queries[8 * i : 8 * i + 8], keys[4 * i : 4 * i + 4])) for i in (0, 1)]
    assert layout_of(torch.stack(groups)).text == "2 times the next 8 rows of q_proj, 4 rows of k_proj"


def test_groups_of_other_sizes_do_not_continue_each_other() -> None:
    queries, keys = numbers_of(Q_PROJ), numbers_of(K_PROJ)
    alone, divided = queries[:8], torch.cat((queries[8:12], keys[:4]))
    text = layout_of(torch.stack((alone, divided))).text
    assert text.startswith(
        "2 parts, of unequal content: the first q_proj, its rows 0–7; number 1 rows 0–3 q_proj"
    )


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ((7,), "7"),
        ((3, 4, 5, 6), "3–6"),
        ((3, 3, 3), "3 3 times"),
        ((0, 2, 4, 6), "0, 2, 4, 6"),
        ((3, 5, 6, 3, 5, 6), "3, 5–6, repeated 2 times"),
        ((1, 0, 3, 2), "in each 2: 1, 0"),
        ((11, 10, 13, 12), "in each 2: 1, 0"),
        ((4, 5, 0, 1, 9), "4–5, 0–1, 9"),
        # Blocks of 2 that advance by 2, but 0 and 5 are no neighbours.
        ((0, 5, 2, 7), "0, 5, 2, 7"),
        ((0, 9, 3, 7, 1, 8, 4), "0, 9, 3, 7, 1, 8, 4"),
        ((0, 9, 3, 7, 1, 8, 4, 6), "0, 9, 3, 7, 1, 8, …, 6"),
    ],
)
def test_text_depends_on_the_pattern(indices: tuple[int, ...], text: str) -> None:
    assert str(IndexSequence(indices=torch.tensor(indices))) == text


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

"""Layouts of tensors as text: of tensors side by side disorder in one is found, and each pattern has its own text."""

from __future__ import annotations

import pytest
import torch

from minimax_tools.capture.manifest import WeightMistake
from minimax_tools.model.weight_names import K_PROJ, Q_PROJ, V_PROJ
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.weight_trace.agreement import Scales
from neuron.weight_trace.layout_check import check_layouts
from neuron.weight_trace.source_tensors import CONSTANT, SourceTensors, TensorOrigin
from neuron.weight_trace.tensor_layout import IndexSequence, TensorLayout, read_layout

SPEC = SyntheticModel().spec()
SOURCES = SourceTensors.of(SPEC)


def numbers_of(name: str) -> torch.Tensor:
    source = SOURCES.get(name)
    assert source is not None
    return torch.arange(source.start, source.start + source.size).reshape(source.shape)


def layout_of(numbers: torch.Tensor) -> TensorLayout:
    origin = TensorOrigin(
        name="kv",
        shape=tuple(numbers.shape),
        dtype=torch.bfloat16,
        numbers=numbers,
        gain=1.0,
        offset=0.0,
        rounding=0.0,
        rounding_float32=0.0,
        constant=None,
    )
    return read_layout(origin, SOURCES)


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

"""Texts of index sequences: each pattern has its own, and a pattern that does not fit is not claimed."""

from __future__ import annotations

import pytest
import torch

from neuron.weight_trace.tensor_layout import IndexSequence


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

"""The tokens on which hypotheses are screened: the last of each prompt, and others evenly spread."""

from __future__ import annotations

import pytest

from compare.diagnosis.layer_case import spread_tokens


@pytest.mark.parametrize(
    ("lengths", "most", "indices"),
    [
        ([6], 4, list(range(6))),
        ([7], 4, [0, 3, 6]),
        # Of three prompts, the ends of two: half of four tokens.
        ([10, 10, 20], 4, [0, 9, 19, 39]),
        ([10, 10, 20], 8, [0, 9, 10, 19, 20, 29, 39]),
        ([40], 8, [0, 6, 13, 20, 26, 32, 39]),
    ],
)
def test_last_tokens_and_others_are_chosen(lengths: list[int], most: int, indices: list[int]) -> None:
    assert spread_tokens(sum(lengths), lengths, most).tolist() == indices

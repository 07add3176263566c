from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minimax_tools.errors import UsageError
from minimax_tools.model.inputs import Inputs, format_positions, num_tokens_left, pad_rows, random_rows

ROWS = [[5, 6, 7], [8]]


def pad(
    rows: list[list[int]], *, side: str = "right", buckets: tuple[int, ...] = (), **options: Any
) -> Inputs:
    return pad_rows(rows, padding_side=side, buckets=buckets, pad_token_id=9, source="a test", **options)


@pytest.mark.parametrize(
    ("side", "ids", "mask"), [("right", [8, 9, 9], [1, 0, 0]), ("left", [9, 9, 8], [0, 0, 1])]
)
def test_padding_follows_or_precedes_the_tokens(side: str, ids: list[int], mask: list[int]) -> None:
    inputs = pad(ROWS, side=side)
    assert inputs.input_ids.tolist() == [[5, 6, 7], ids]
    assert inputs.attention_mask.tolist() == [[1, 1, 1], mask]
    assert inputs.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_count_on_from_each_rows_first(side: str) -> None:
    inputs = pad(ROWS, side=side, buckets=(4,), start_positions=(5, 4096))
    assert inputs.row_positions() == [[5, 6, 7], [4096]]
    assert inputs.next_positions.tolist() == [[8], [4097]]
    # Padding takes a position of its row: transformers masks it, and none lies past the model's last.
    assert inputs.position_ids.unique().tolist() == [5, 6, 7, 4096]


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ((0, 4096), "positions 0-2, 4096"),
        ((4, 7), "positions 4-7"),
        ((0, 1), "positions 0-2"),
        ((196605, 0), "positions 0, 196605-196607"),
    ],
)
def test_positions_are_worded_as_runs_without_padding(starts: tuple[int, int], words: str) -> None:
    assert format_positions(pad(ROWS, buckets=(8,), start_positions=starts)) == words


def test_tokens_that_the_model_has_positions_for_can_follow() -> None:
    assert num_tokens_left(6, 8) == 2
    # The last of them is never fed.
    assert num_tokens_left(7, 8) == 1


@pytest.mark.parametrize(("buckets", "length"), [((), 3), ((4, 8), 4), ((8, 4), 4), ((2, 3), 3), ((3,), 3)])
def test_smallest_bucket_that_fits_is_taken(buckets: tuple[int, ...], length: int) -> None:
    assert pad(ROWS, buckets=buckets).sequence_length == length


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([[1, 2, 3]], "the longest row has 3 tokens: expected at most the largest bucket, 2"),
        ([], "at least one row"),
        ([[1], []], "row 1 has no token"),
    ],
)
def test_rows_that_cannot_be_padded_are_refused(rows: list[list[int]], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        pad(rows, buckets=(1, 2))


def test_counts() -> None:
    inputs = pad(ROWS, buckets=(8,))
    assert (inputs.batch_size, inputs.sequence_length, inputs.lengths, inputs.num_tokens) == (2, 8, (3, 1), 4)
    assert str(inputs) == "2 rows (3, 1 tokens, padded to 8) from a test"


def test_digest_is_equal_for_equal_inputs_only() -> None:
    inputs = pad(ROWS)
    assert pad(ROWS).digest() == inputs.digest()
    assert replace(inputs, source="elsewhere").digest() == inputs.digest()
    assert pad(ROWS, side="left").digest() != inputs.digest()
    assert pad(ROWS, buckets=(4,)).digest() != inputs.digest()
    assert pad([[5, 6, 7], [7]]).digest() != inputs.digest()
    assert replace(inputs, position_ids=inputs.position_ids + 1).digest() != inputs.digest()


def test_tensors_of_unequal_shapes_are_a_mistake_of_the_caller() -> None:
    inputs = pad(ROWS)
    with pytest.raises(ValueError, match="one .B,S. shape"):
        replace(inputs, attention_mask=torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="one .B,S. shape"):
        Inputs(**dict.fromkeys(inputs.tensors(), torch.ones(3, dtype=torch.int64)), source="a test")


def test_random_rows_repeat_with_their_seed() -> None:
    rows = random_rows((5, 2), batch_size=2, vocab_size=50, seed=3)
    assert [len(row) for row in rows] == [5, 2, 5, 2]
    assert rows[0] != rows[2]
    assert all(0 <= token < 50 for row in rows for token in row)
    assert random_rows((5, 2), batch_size=2, vocab_size=50, seed=3) == rows
    assert random_rows((5, 2), batch_size=2, vocab_size=50, seed=4) != rows

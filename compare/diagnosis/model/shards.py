"""Shards: functions from the vocabulary rows that are asked for, int64 [C], to the rows that a mistaken rank uses.

A shard is here the block of rows, or of hidden channels, that one of `tp_degree` ranks holds.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

from compare.diagnosis.catalogue.splits import degree_of, degrees, rank_of
from compare.diagnosis.mistake import Parameters, values_of
from compare.diagnosis.model.mistake import ModelInputs

# Orders of shards: the last rank's first; rank r holds every n-th row, from row r on, where a block was meant; and the
# reverse, rank r holds a block where every n-th row was meant.
_REVERSED, _STRIDED, _GATHERED_STRIDED = "reversed", "strided", "gathered strided"

# Candidates: a number of ranks that hold the vocabulary or the hidden channels, without and with one of these ranks.
vocabulary_degrees = degree_of("tp_degree", "vocab_size")
hidden_degrees = degree_of("tp_degree", "hidden_size")
vocabulary_ranks = rank_of("tp_degree", "vocab_size")
hidden_ranks = rank_of("tp_degree", "hidden_size")
shifts = values_of("by", 1, -1, 2, -2, 3, -3, 4, -4, 8, -8, 16, -16)


def vocabulary_orders(inputs: ModelInputs) -> tuple[Parameters, ...]:
    """List wrong orders in which shards may be put together."""
    return tuple(
        MappingProxyType({"tp_degree": degree, "order": order})
        for degree in degrees(inputs.spec.vocab_size)
        for order in (_REVERSED, _STRIDED, _GATHERED_STRIDED)
    )


def is_of_rank(rows: torch.Tensor, num_rows: int, tp_degree: int, rank: int) -> torch.Tensor:
    """Decide whether rows [C] of `num_rows` lie in a rank's shard, bool [C]."""
    return rows // (num_rows // tp_degree) == rank


def within_first_shard(rows: torch.Tensor, vocab_size: int, tp_degree: int) -> torch.Tensor:
    """Map rows [C] to the rows of rank 0's shard with the same place in the shard."""
    return rows % (vocab_size // tp_degree)


def reordered(rows: torch.Tensor, vocab_size: int, tp_degree: int, order: str) -> torch.Tensor:
    """Map rows [C] to the rows that stand in their place if shards are in another order."""
    num_rows = vocab_size // tp_degree
    if order == _REVERSED:
        return (tp_degree - 1 - rows // num_rows) * num_rows + rows % num_rows
    if order == _STRIDED:
        return (rows % num_rows) * tp_degree + rows // num_rows
    return (rows % tp_degree) * num_rows + rows // tp_degree


def shifted(rows: torch.Tensor, vocab_size: int, by: int) -> torch.Tensor:
    """Map rows [C] to the rows `by` places later; after the last row comes the first."""
    return (rows + by) % vocab_size

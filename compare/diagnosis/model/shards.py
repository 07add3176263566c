"""Shards: vocabulary rows that ranks mistake for others, as maps from a row to the one that is used instead.

V the vocabulary, N rows of a rank's shard, C rows that are asked for.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

from compare.diagnosis.catalogue.splits import degree_of, degrees, rank_of
from compare.diagnosis.mistake import Parameters, values_of
from compare.diagnosis.model.scene import ModelScene

REVERSED, STRIDED, GATHERED_STRIDED = "reversed", "strided", "gathered strided"
ORDERS = (REVERSED, STRIDED, GATHERED_STRIDED)


# How many ranks the vocabulary or the hidden channels may be spread over, without and with one of the ranks.
vocabulary_degrees = degree_of("tp_degree", "vocab_size")
hidden_degrees = degree_of("tp_degree", "hidden_size")
vocabulary_ranks = rank_of("tp_degree", "vocab_size")
hidden_ranks = rank_of("tp_degree", "hidden_size")
shifts = values_of("by", 1, -1, 2, -2, 3, -3, 4, -4, 8, -8, 16, -16)


def vocabulary_orders(scene: ModelScene) -> tuple[Parameters, ...]:
    """List orders in which shards may be put together wrongly."""
    return tuple(
        MappingProxyType({"tp_degree": degree, "order": order})
        for degree in degrees(scene.spec.vocab_size)
        for order in ORDERS
    )


def is_of_rank(rows: torch.Tensor, num_rows: int, tp_degree: int, rank: int) -> torch.Tensor:
    """Find those of some rows [C] that lie in a rank's shard, bool [C]."""
    return rows // (num_rows // tp_degree) == rank


def within_first_shard(rows: torch.Tensor, vocab_size: int, tp_degree: int) -> torch.Tensor:
    """Map rows [C] to those of rank 0's shard that have the same place."""
    return rows % (vocab_size // tp_degree)


def reordered(rows: torch.Tensor, vocab_size: int, tp_degree: int, order: str) -> torch.Tensor:
    """Map rows [C] to those that stand in their place where shards are in another order."""
    num_rows = vocab_size // tp_degree
    if order == REVERSED:
        return (tp_degree - 1 - rows // num_rows) * num_rows + rows % num_rows
    if order == STRIDED:
        return (rows % num_rows) * tp_degree + rows // num_rows
    return (rows % tp_degree) * num_rows + rows // tp_degree


def shifted(rows: torch.Tensor, vocab_size: int, by: int) -> torch.Tensor:
    """Map rows [C] to those `by` rows behind, around the end."""
    return (rows + by) % vocab_size

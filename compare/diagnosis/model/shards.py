"""Shards: vocabulary rows that ranks mistake for others, as maps from a row to the one that is used instead.

V the vocabulary, N rows of a rank's shard, C rows that are asked for.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

from compare.diagnosis.catalogue.splits import MOST_RANKS, degrees
from compare.diagnosis.mistake import Parameters
from compare.diagnosis.model.mistake import ModelCandidates, each
from compare.diagnosis.model.scene import ModelScene

REVERSED, STRIDED, GATHERED_STRIDED = "reversed", "strided", "gathered strided"
ORDERS = (REVERSED, STRIDED, GATHERED_STRIDED)
_SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4, 8, -8, 16, -16)


def _with_ranks(found: tuple[int, ...]) -> tuple[Parameters, ...]:
    return tuple(
        MappingProxyType({"tp_degree": degree, "rank": rank})
        for degree in found
        for rank in (range(degree) if degree <= MOST_RANKS else range(1))
    )


# How many ranks the vocabulary or the hidden channels may be spread over, without and with one of the ranks.
vocabulary_degrees = each("tp_degree", lambda scene: degrees(scene.spec.vocab_size))
hidden_degrees = each("tp_degree", lambda scene: degrees(scene.spec.hidden_size))
vocabulary_ranks: ModelCandidates = lambda scene, _: _with_ranks(degrees(scene.spec.vocab_size))  # noqa: E731
hidden_ranks: ModelCandidates = lambda scene, _: _with_ranks(degrees(scene.spec.hidden_size))  # noqa: E731
shifts = each("by", lambda _: _SHIFTS)


def vocabulary_orders(scene: ModelScene, _: torch.Tensor) -> tuple[Parameters, ...]:
    """List orders in which shards may be put together wrongly."""
    return tuple(
        MappingProxyType({"tp_degree": degree, "order": order})
        for degree in degrees(scene.spec.vocab_size)
        for order in ORDERS
    )


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

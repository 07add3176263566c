"""Chain limits: how far the end of a chain of layers may drift, by its length."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from compare.chains.chain_noise import ChainError

# The largest that right ports came to in the 8,400 chains that begin at every layer of nine synthetic models
# (scripts/bench_chained_ends.py, its default settings), in the order of `ChainError`'s fields.
_REACHED = (
    (0.640, 0.726, 0.833, 1.01, 0.714),
    (0.938, 2.39, 8.64, 23.0, 2.07),
    (3.73, 12.2, 23.0, 31.7, 4.11),
    (12.8, 24.4, 38.2, 53.6, 4.11),
    (27.8, 39.4, 53.8, 71.1, 4.11),
    (33.2, 44.9, 60.1, 83.4, 4.40),
    (38.5, 51.1, 74.7, 93.5, 7.33),
    (42.9, 58.8, 82.5, 97.7, 9.09),
)
# What is measured on a few models is not the most that any right port can come to.
_MARGIN = 2.0
_BFLOAT16: Mapping[int, ChainError] = MappingProxyType(
    {
        length: ChainError(
            lower_quartile=lower, median=median, upper_quartile=upper, ninth_decile=ninth, massive=massive
        ).times(_MARGIN)
        for length, (lower, median, upper, ninth, massive) in enumerate(_REACHED, start=1)
    }
)
LONGEST_CHAIN = max(_BFLOAT16)
# In BF16 two layers hide less than 2 % of the output, three 8 %, four a third; in float32 next to nothing is lost.
_SHORT, _LONG = 2, LONGEST_CHAIN


def chain_limits(length: int, dtype: torch.dtype) -> ChainError:
    """Return the limits at the end of a chain.

    Args:
        length: Its number of layers, at most `LONGEST_CHAIN`.
        dtype: What the golden computed in. In float32 noise flips hardly an expert, and does not grow: right ports
            stayed below 0.4 of the unit up to the longest chain.
    """
    return _BFLOAT16[1 if dtype is torch.float32 else length]


def default_chain_length(dtype: torch.dtype) -> int:
    """Return the default number of layers of a chain."""
    return _LONG if dtype is torch.float32 else _SHORT

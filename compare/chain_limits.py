"""Chain limits: how far the end of a chain of layers may drift, by its length."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from compare.chain_noise import ChainError

# The largest that right ports came to in the 6,200 chains that begin at every layer of nine synthetic models
# (scripts/bench_chained_ends.py, its default settings), in the order of `ChainError`'s fields.
_REACHED = (
    (0.640, 0.726, 0.833, 1.01, 0.714),
    (0.938, 2.39, 5.02, 13.2, 2.07),
    (2.50, 4.70, 11.4, 30.4, 4.11),
    (6.24, 12.9, 23.7, 45.9, 4.11),
    (14.5, 25.5, 44.2, 64.9, 4.11),
    (26.6, 39.3, 57.3, 77.3, 4.40),
    (33.1, 46.1, 70.4, 87.4, 7.33),
    (41.4, 57.3, 80.2, 97.2, 9.09),
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
# In BF16 two layers hide less than 2 % of the output, three 6 %, four 16 %; in float32 next to nothing is lost.
_SHORT, _LONG = 2, LONGEST_CHAIN


def chain_limits(length: int, dtype: torch.dtype) -> ChainError:
    """The limits at the end of a chain.

    Args:
        length: Its number of layers, at most `LONGEST_CHAIN`.
        dtype: What the golden computed in. In float32 noise flips hardly an expert, and does not grow: right ports
            stayed below 0.4 of the unit up to the longest chain.
    """
    return _BFLOAT16[1 if dtype is torch.float32 else length]


def default_chain_length(dtype: torch.dtype) -> int:
    """How many layers a chain has where the user does not say."""
    return _LONG if dtype is torch.float32 else _SHORT

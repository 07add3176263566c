"""Chain limits: how far the end of a chain of layers may drift, by its length."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from compare.chain_noise import ChainError

# The largest that right ports came to on synthetic models (scripts/bench_chained_ends.py, its default settings).
_REACHED = (
    (0.624, 0.72, 0.80, 1.0, 0.56),
    (0.844, 1.00, 2.27, 10.0, 1.8),
    (1.55, 2.9, 10.7, 25.8, 2.07),
    (2.66, 6.74, 24.3, 47.6, 2.9),
    (6.6, 20.7, 45.1, 65.4, 2.9),
    (15.5, 32.3, 58.2, 78.0, 4.0),
    (24.1, 43.3, 72.1, 87.6, 4.7),
    (35.8, 52.0, 83.9, 98.2, 4.7),
)
# What is measured on a few models is not the most that any right port can come to.
_MARGIN = 2.0
LIMITS: Mapping[int, ChainError] = MappingProxyType(
    {
        length: ChainError(
            lower_quartile=lower, median=median, upper_quartile=upper, ninth_decile=ninth, massive=massive
        ).times(_MARGIN)
        for length, (lower, median, upper, ninth, massive) in enumerate(_REACHED, start=1)
    }
)
LONGEST_CHAIN = max(LIMITS)

# In BF16 three layers hide what is 4 % of the output, four what is 10 %, two 1.5 %. In float32 nothing is lost.
_SHORT, _LONG = 2, LONGEST_CHAIN


def default_chain_length(dtype: torch.dtype) -> int:
    """How many layers a chain has where the user does not say."""
    return _LONG if dtype is torch.float32 else _SHORT

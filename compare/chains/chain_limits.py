"""Chain limits: the largest error that a right port may have at the end of a chain of layers, by the chain's length.

A chain is a few layers that run one after the other, from the golden's input to the first. The error is in the unit of
`chain_noise`: what BF16 costs the chain's layers one by one.
"""

from __future__ import annotations

import torch

from compare.chains.chain_noise import PARTS, ChainError

# Largest errors of right ports in 8,400 chains, which begin at every layer of nine synthetic models; measured by
# scripts/bench_chained_ends.py with its default settings. A line for each length, from 1 layer on. The columns are the
# fields of `ChainError`: lower quartile, median, upper quartile and ninth decile over the tokens, and massive channels.
_LARGEST_ERRORS = (
    (0.640, 0.726, 0.833, 1.01, 0.714),
    (0.938, 2.39, 8.64, 23.0, 2.07),
    (3.73, 12.2, 23.0, 31.7, 4.11),
    (12.8, 24.4, 38.2, 53.6, 4.11),
    (27.8, 39.4, 53.8, 71.1, 4.11),
    (33.2, 44.9, 60.1, 83.4, 4.40),
    (38.5, 51.1, 74.7, 93.5, 7.33),
    (42.9, 58.8, 82.5, 97.7, 9.09),
)
# A limit is this many times the largest error measured: right ports on other models may have larger ones.
_MARGIN = 2.0
LONGEST_CHAIN = len(_LARGEST_ERRORS)
# Default lengths. A longer chain needs fewer runs, and its wider limits let larger mistakes pass. In BF16 the limits of
# two layers let an error below 2 % of the output pass, three layers 8 %, four a third. Limits in float32 do not widen.
_DEFAULT_IN_BFLOAT16, _DEFAULT_IN_FLOAT32 = 2, LONGEST_CHAIN


def chain_limits(length: int, dtype: torch.dtype) -> ChainError:
    """Return the limits at the end of a chain of `length` layers, at most `LONGEST_CHAIN`.

    If the golden computed in float32, they are those of one layer for any length: noise flips hardly an expert and does
    not grow. Right ports stayed below 0.4 of the unit up to the longest chain.
    """
    errors = _LARGEST_ERRORS[0 if dtype is torch.float32 else length - 1]
    return ChainError(**dict(zip(PARTS, errors, strict=True))).times(_MARGIN)


def default_chain_length(dtype: torch.dtype) -> int:
    """Return the default number of layers of a chain, for a golden that computed in `dtype`."""
    return _DEFAULT_IN_FLOAT32 if dtype is torch.float32 else _DEFAULT_IN_BFLOAT16

"""Chain limits: the largest error that a right port may have at the end of a chain of layers, by the chain's length.

A chain is a few layers that run one after the other, from the golden's input to the first. The error is in the unit of
`chain_noise`: what BF16 costs the chain's layers one by one.
"""

from __future__ import annotations

import torch

from compare.chains.chain_noise import PARTS, ChainError
from compare.chains.largest_errors import LARGEST_ERRORS, LONGEST_CHAIN

# A limit is this many times the largest error measured: right ports on other models may have larger ones.
_MARGIN = 2.0
# Default lengths. A longer chain needs fewer runs, and its wider limits let larger mistakes pass. In BF16 the limits of
# two layers let an error below 2 % of the output pass, three layers 8 %, four a third. Limits in float32 do not widen.
_DEFAULT_IN_BFLOAT16, _DEFAULT_IN_FLOAT32 = 2, LONGEST_CHAIN


def chain_limits(length: int, dtype: torch.dtype) -> ChainError:
    """Return the limits at the end of a chain of `length` layers, at most `LONGEST_CHAIN`.

    If the golden computed in float32, they are those of one layer for any length: noise flips hardly an expert and does
    not grow. Right ports stayed below 0.4 of the unit up to the longest chain.
    """
    errors = LARGEST_ERRORS[0 if dtype is torch.float32 else length - 1]
    return ChainError(**dict(zip(PARTS, errors, strict=True))).times(_MARGIN)


def default_chain_length(dtype: torch.dtype) -> int:
    """Return the default number of layers of a chain, for a golden that computed in `dtype`."""
    return _DEFAULT_IN_FLOAT32 if dtype is torch.float32 else _DEFAULT_IN_BFLOAT16

"""Weights that quantising keeps: a port that quantises on purpose is right on them, and one with a mistake is not.

FP8: every value of a matrix is a power of two with a sign, and the power changes from block to block. FP8 codes hold
them exactly, whatever the scale is taken of: a block, a row, several matrices side by side.
INT8: whole numbers from -127 to 127 times a power of two, the largest 127 wherever a scale may be taken of. The power
changes from row to row, or from block to block, so that a scale of another place shows.
R rows and C columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch

from minimax_tools.checkpoint.fp8 import BLOCK_SIZE
from minimax_tools.model.weight_names import ATTENTION_MATRICES, EXPERTS
from neuron.weight_trace.exchanges import OnAccess, Tensors

_NUM_POWERS = 3
_LARGEST_INT8 = 127.0
# Standard deviations that the largest code stands for.
_REACH = 3.0
# Ports take an INT8 scale of this many neighbours of a row, or of a multiple.
_GROUP = 32


def keep_quantised(tensors: Tensors, keep: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """A layer's tensors, those that ports quantise in values that quantising keeps; each is made when it is asked for.

    Args:
        tensors: By the hub's relative names; the signs are theirs, and the sizes nearly so.
        keep: One of `KEPT`.
    """
    return OnAccess(
        {
            name: partial(_keep, tensors, name, keep)
            if _is_quantised(name)
            else partial(tensors.__getitem__, name)
            for name in tensors
        }
    )


def _is_quantised(name: str) -> bool:
    return name in ATTENTION_MATRICES or EXPERTS in name


def _keep(tensors: Tensors, name: str, keep: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return keep(tensors[name])


def _keep_fp8(matrix: torch.Tensor) -> torch.Tensor:
    size = torch.exp2(matrix.std().log2().round())
    return torch.where(matrix < 0, -size, size) * torch.exp2(-_powers_by_block(matrix))


def _keep_int8(matrix: torch.Tensor, powers: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Whole numbers [R,C] with the largest in every group of a row, times powers of two."""
    reach = _REACH * matrix.std()
    codes = (matrix / reach * _LARGEST_INT8).round().clamp(1.0 - _LARGEST_INT8, _LARGEST_INT8 - 1.0)
    # One for all matrices of this width: ports quantise several of them side by side.
    unit = 2.0 ** round(math.log2(_REACH / _LARGEST_INT8 / math.sqrt(matrix.shape[1])))
    for group in codes.split(_GROUP, dim=1):
        largest = group.abs().argmax(dim=1, keepdim=True)
        signs = torch.where(group.gather(1, largest) < 0, -1.0, 1.0)
        group.scatter_(1, largest, signs * _LARGEST_INT8)
    return codes * unit * torch.exp2(-powers(matrix))


def _powers_by_block(matrix: torch.Tensor) -> torch.Tensor:
    """[R,C]; no two blocks beside or below each other have one power, and a transposed grid has others."""
    rows, columns = (torch.arange(length) // BLOCK_SIZE for length in matrix.shape)
    return ((rows[:, None] + 2 * columns[None, :]) % _NUM_POWERS).float()


def _powers_by_row(matrix: torch.Tensor) -> torch.Tensor:
    """[R,1]; rows below each other have other powers."""
    return (torch.arange(matrix.shape[0]) % _NUM_POWERS).float()[:, None]


# By how a port quantises: values of its own for each, of which the others' codes are not exact.
KEPT: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "FP8": _keep_fp8,
        "INT8 with a scale for each row": partial(_keep_int8, powers=_powers_by_row),
        "INT8 with a scale for each block": partial(_keep_int8, powers=_powers_by_block),
    }
)

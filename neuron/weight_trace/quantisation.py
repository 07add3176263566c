"""Quantisation: generated weights that FP8 or INT8 hold exactly.

On such weights a port that quantises on purpose is right, and a port with a mistake is wrong.

- FP8: plus or minus a power of two. It is exact under the scale of a block, of a row, or of several matrices.
- INT8: whole numbers from -127 to 127 times a power of two, with ±127 in every group that may get a scale.

The power of two changes from block to block (FP8, INT8) or from row to row (INT8). So a scale taken from another place
shows as an error. R rows and C columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch

from minimax_tools.model.quantisation import BLOCK_SIZE
from minimax_tools.model.weight_names import ATTENTION_MATRICES, EXPERTS
from neuron.weight_trace.generated_tensors import LazyTensors, Tensors

# Three different powers: the blocks to the right, below, and at the transposed place all have another one.
_NUM_POWERS = 3
_MAX_INT8 = 127.0
# Standard deviations at which codes reach 127: beyond lie 0.3 % of normal weights, which are clamped.
_NUM_DEVIATIONS = 3.0
# Ports take one INT8 scale for this many neighbours of a row, or for a multiple of it.
_GROUP_SIZE = 32


def make_exact(tensors: Tensors, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """Return a layer's tensors, with those that ports quantise changed to exact values, each made on access.

    Args:
        tensors: Tensors by the hub's names relative to the layer. Signs stay, magnitudes do not.
        change: One of `EXACT_VALUES`.
    """
    return LazyTensors(tensors, lambda name: change(tensors[name]) if _is_quantised(name) else tensors[name])


def _is_quantised(name: str) -> bool:
    return name in ATTENTION_MATRICES or EXPERTS in name


def _exact_fp8(matrix: torch.Tensor) -> torch.Tensor:
    """Return plus or minus one power of two, divided by 1, 2 or 4 block by block."""
    size = torch.exp2(matrix.std().log2().round())
    return torch.where(matrix < 0, -size, size) * torch.exp2(-_powers_by_block(matrix))


def _exact_int8(matrix: torch.Tensor, powers: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return whole numbers [R,C] with ±127 in every group of a row, times powers of two."""
    reach = _NUM_DEVIATIONS * matrix.std()
    # ±127 is kept for the largest code of each group, below.
    codes = (matrix / reach * _MAX_INT8).round().clamp(1.0 - _MAX_INT8, _MAX_INT8 - 1.0)
    # All matrices of this width have the same unit: ports quantise several of them side by side.
    unit = 2.0 ** round(math.log2(_NUM_DEVIATIONS / _MAX_INT8 / math.sqrt(matrix.shape[1])))
    for group in codes.split(_GROUP_SIZE, dim=1):
        largest = group.abs().argmax(dim=1, keepdim=True)
        signs = torch.where(group.gather(1, largest) < 0, -1.0, 1.0)
        group.scatter_(1, largest, signs * _MAX_INT8)
    return codes * unit * torch.exp2(-powers(matrix))


def _powers_by_block(matrix: torch.Tensor) -> torch.Tensor:
    """Return powers [R,C] that differ between neighbouring blocks, and between a grid of blocks and its transpose."""
    rows, columns = (torch.arange(length) // BLOCK_SIZE for length in matrix.shape)
    return ((rows[:, None] + 2 * columns[None, :]) % _NUM_POWERS).float()


def _powers_by_row(matrix: torch.Tensor) -> torch.Tensor:
    """Return powers [R,1] that differ between neighbouring rows."""
    return (torch.arange(matrix.shape[0]) % _NUM_POWERS).float()[:, None]


# Ways to quantise, and the function that makes a matrix exact in each. Values exact in one way are not in the others.
EXACT_VALUES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "FP8": _exact_fp8,
        "INT8 with a scale for each row": partial(_exact_int8, powers=_powers_by_row),
        "INT8 with a scale for each block": partial(_exact_int8, powers=_powers_by_block),
    }
)

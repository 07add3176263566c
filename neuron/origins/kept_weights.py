"""Weights that quantising keeps: a port that quantises on purpose is right on them, and one with a mistake is not.

Every value of a matrix is a power of two with a sign; the power changes from block to block. FP8 codes hold them
exactly, whatever the scale is taken of: a block, a row, several matrices side by side.
R rows and C columns of a matrix.
"""

from __future__ import annotations

from functools import partial

import torch

from minimax_tools.checkpoint.fp8 import BLOCK_SIZE
from minimax_tools.checkpoint.names import ATTENTION_MATRICES, EXPERTS
from neuron.origins.exchanges import Tensors
from neuron.origins.on_access import OnAccess

_NUM_POWERS = 3


def keep_quantised(tensors: Tensors) -> Tensors:
    """A layer's tensors, those that ports quantise in values that quantising keeps; each is made when it is asked for.

    Args:
        tensors: By the hub's relative names; the signs are theirs, and the sizes nearly so.
    """
    return OnAccess(
        {
            name: partial(_keep, tensors, name) if _is_quantised(name) else partial(tensors.__getitem__, name)
            for name in tensors
        }
    )


def _is_quantised(name: str) -> bool:
    return name in ATTENTION_MATRICES or EXPERTS in name


def _keep(tensors: Tensors, name: str) -> torch.Tensor:
    """[R,C]; no two blocks beside or below each other have one power, and a transposed grid has others."""
    matrix = tensors[name]
    size = torch.exp2(matrix.std().log2().round())
    rows, columns = (torch.arange(length) // BLOCK_SIZE for length in matrix.shape)
    powers = (rows[:, None] + 2 * columns[None, :]) % _NUM_POWERS
    return torch.where(matrix < 0, -size, size) * torch.exp2(-powers.float())

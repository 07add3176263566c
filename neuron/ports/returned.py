"""The output of a layer, in what a port returned."""

from __future__ import annotations

import torch

from minimax_tools.errors import TargetError

_NEXT_STEP = "Return hidden states [B,S,H] first."


def find_output(result: object, shape: tuple[int, ...], *, what: str) -> torch.Tensor:
    """The output [B,S,H] of a layer: what a port returned, or the first of several; [B·S,H] is reshaped.

    Args:
        result: What it returned.
        shape: B, S and H.
        what: The port in words, for errors.

    Raises:
        TargetError: It returned no tensor, or one of another shape: as many numbers in another order are no output.
    """
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(first, torch.Tensor):
        raise TargetError(
            f"{what} returned no tensor",
            expected="the layer's output, or a tuple that begins with it",
            found=type(first).__name__,
            next_step=_NEXT_STEP,
        )
    flat = (shape[0] * shape[1], shape[2])
    if tuple(first.shape) not in (shape, flat):
        raise TargetError(
            f"{what} returned another shape",
            expected=f"{list(shape)} or {list(flat)}",
            found=str(list(first.shape)),
            next_step=_NEXT_STEP,
        )
    return first.reshape(shape)

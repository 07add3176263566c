"""The past that a port attends to: keys and values, given as `past_key_value` and returned second.

    module(hidden_states [B,S,H], attention_mask [B,P+S], position_ids [B,S], past_key_value=(k, v))
        -> (output [B,S,H], (k, v))

Keys are rotated; what is given is [B,K,P,D], what is returned [B,K,P+S,D], or the last S rows of it. Rows of the past
whose mask is 0 must not be seen: the past is of one length for every step, so that a step compiles nothing.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from minimax_tools.errors import TargetError
from neuron.builtin.layer import KeyValues

PAST = "past_key_value"
_NEXT_STEP = (
    f"To take part in decoding, accept {PAST} and return (output, (keys, values)); "
    "scripts/examples shows a port that does."
)


def require_past(module: nn.Module, *, what: str) -> None:
    """Pass where the port accepts a past.

    Raises:
        TargetError: It does not.
    """
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if PAST not in parameters and not takes_any:
        raise TargetError(
            f"{what} cannot decode: its forward does not accept {PAST}",
            expected=f"forward(hidden_states, attention_mask, position_ids, {PAST}=None)",
            found=f"forward({', '.join(parameters)})",
            next_step=_NEXT_STEP,
        )


def find_key_values(result: object, batch_shape: tuple[int, int], *, what: str) -> KeyValues:
    """The keys and values [B,K,S,D] of the rows that a port was fed, of what it returned.

    Args:
        result: What it returned.
        batch_shape: B and S.
        what: The port in words, for errors.

    Raises:
        TargetError: It returned none, or of another shape.
    """
    second = result[1] if isinstance(result, (tuple, list)) and len(result) > 1 else None
    if not isinstance(second, (tuple, list)) or len(second) != 2:
        raise _misses(what, "no pair" if second is None else type(second).__name__)
    keys, values = second
    batch_size, num_rows = batch_shape
    for tensor in (keys, values):
        if not isinstance(tensor, torch.Tensor):
            raise _misses(what, type(tensor).__name__)
        if tensor.ndim != 4 or tensor.shape[0] != batch_size or tensor.shape[2] < num_rows:
            raise _misses(what, str(list(tensor.shape)))
    return keys[:, :, -num_rows:], values[:, :, -num_rows:]


def _misses(what: str, found: str) -> TargetError:
    return TargetError(
        f"{what} returned no keys and values",
        expected="a pair of tensors [batch, kv heads, rows, head_dim], second of what it returns",
        found=found,
        next_step=_NEXT_STEP,
    )

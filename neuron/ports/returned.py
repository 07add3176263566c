"""The output, keys and values in a port's return value.

B batch, S sequence, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from minimax_tools.capture.recorder import require_values
from minimax_tools.errors import TargetError
from neuron.builtin.layer import KeyValues

# Name of the argument that a port takes the past by.
PAST = "past_key_value"
_OUTPUT_STEP = "Return hidden states [B,S,H] first."
_DECODING_STEP = (
    f"To take part in decoding, accept {PAST} and return (output, (keys, values)); "
    "scripts/examples shows a port that does."
)


def find_output(result: object, shape: tuple[int, ...], *, what: str) -> torch.Tensor:
    """Return the output [B,S,H] of a layer: a port's return value, or the first of several; [B·S,H] is reshaped.

    `shape` holds B, S and H; `what` names the port in errors.

    Raises:
        TargetError: The port returned no tensor, one of another shape, or one without values.
    """
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(first, torch.Tensor):
        raise TargetError(
            f"{what} returned no tensor",
            expected="the layer's output, or a tuple that begins with it",
            found=type(first).__name__,
            next_step=_OUTPUT_STEP,
        )
    require_values(first, what=f"the output of {what}")
    flat = (shape[0] * shape[1], shape[2])
    if tuple(first.shape) not in (shape, flat):
        raise TargetError(
            f"{what} returned another shape",
            expected=f"{list(shape)} or {list(flat)}",
            found=str(list(first.shape)),
            next_step=_OUTPUT_STEP,
        )
    return first.reshape(shape)


def require_past(module: nn.Module, *, what: str) -> None:
    """Raise TargetError unless the port accepts a past."""
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if PAST not in parameters and not takes_any:
        raise TargetError(
            f"{what} cannot decode: its forward does not accept {PAST}",
            expected=f"forward(hidden_states, attention_mask, position_ids, {PAST}=None)",
            found=f"forward({', '.join(parameters)})",
            next_step=_DECODING_STEP,
        )


def find_key_values(result: object, batch_shape: tuple[int, int], *, what: str) -> KeyValues:
    """Return the keys and values [B,K,S,D] of a pass's positions, from the second of a port's return values.

    A pass is the prefill or one decoded token. `batch_shape` holds its B and S; `what` names the port in errors.

    Raises:
        TargetError: The port returned no keys and values, or tensors of another shape.
    """
    second = result[1] if isinstance(result, (tuple, list)) and len(result) > 1 else None
    if not isinstance(second, (tuple, list)) or len(second) != 2:
        raise _no_key_values(what, "no pair" if second is None else type(second).__name__)
    keys, values = second
    batch_size, num_positions = batch_shape
    for tensor in (keys, values):
        if not isinstance(tensor, torch.Tensor):
            raise _no_key_values(what, type(tensor).__name__)
        require_values(tensor, what=f"keys or values of {what}")
        if tensor.ndim != 4 or tensor.shape[0] != batch_size or tensor.shape[2] < num_positions:
            raise _no_key_values(what, str(list(tensor.shape)))
    # A port may return the whole cache: the past's positions, and behind them those of this pass.
    return keys[:, :, -num_positions:], values[:, :, -num_positions:]


def _no_key_values(what: str, found: str) -> TargetError:
    return TargetError(
        f"{what} returned no keys and values that fit the pass",
        expected="(output, (keys, values)), keys and values each [batch, kv heads, positions, head_dim]",
        found=found,
        next_step=_DECODING_STEP,
    )

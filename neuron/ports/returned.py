"""A port's return values: a layer's output, keys and values; a whole port's logits, cache, chosen tokens and sites.

B batch, S sequence or columns of a pass, P columns of the cache, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from minimax_tools.capture.passes import CachePair
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
    if _accepted(module, (PAST,)) is None:
        parameters = inspect.signature(module.forward).parameters
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


# Name of the argument that a port takes its past by, and of what it returns.
MODEL_PAST = "past_key_values"
# The name that transformers' own models have for both since 5.24.
_PAST_OF_TRANSFORMERS = "cache"
# Attribute of a port that keeps the keys and values of earlier passes itself.
KEEPS_CACHE = "keeps_cache"
# Attribute of a port that takes no pass of several tokens behind a cache, if it is False.
TAKES_CHUNKS = "takes_chunks"
# Attribute of a port whose prefill takes one row of a batch: the rows come one after the other, each with the past that
# the one before returned.
PREFILLS_BY_ROW = "prefills_by_row"
# Methods of a port that divides the tokens of a pass among ranks: whole sites from parts, and a layer's input cut.
JOIN_TOKENS, CUT_TOKENS = "join_tokens", "cut_tokens"
# Method of a port that replaces its stream itself: the next pass takes states [B,S,H] for what a layer is given, by the
# layer's number, or for what the final norm is given, by the number of layers. `None, None` ends it.
REPLACE_STREAM = "replace_stream"
# Method of a port that returns its cache.
READ_CACHE = "read_cache"

_RETURN_STEP = f"Return logits, or (logits, {MODEL_PAST}), as scripts/examples/model_port.py does."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelResult:
    """The result of a whole port's pass, on the device."""

    logits: torch.Tensor  # [B,S,vocab], or [B,1,vocab] of each row's last token
    past: object = None  # what the port takes as past in the next pass; None if it keeps the cache itself
    tokens: torch.Tensor | None = None  # tokens that the port chose, [B]; None if it chooses none
    # Sites that a compiled port returns, by `layer_3.output` or `final_norm`.
    sites: Mapping[str, torch.Tensor] = field(default_factory=dict)


def parse_result(result: object, batch_shape: tuple[int, int], *, what: str) -> ModelResult:
    """Read what a port returned of a pass over [B,S] tokens; `what` names the port in errors.

    Raises:
        TargetError: There are no logits, or of another shape; or the chosen tokens are no [B] or [B,1].
    """
    if isinstance(result, torch.Tensor):
        fields: dict[str, Any] = {"logits": result}
    elif isinstance(result, Mapping):
        fields = dict(result)
    elif hasattr(result, "logits"):
        names = ("logits", MODEL_PAST, _PAST_OF_TRANSFORMERS, "tokens", "sites")
        fields = {name: getattr(result, name, None) for name in names}
    elif isinstance(result, (tuple, list)) and result:
        fields = dict(zip(("logits", MODEL_PAST, "tokens"), result, strict=False))
    else:
        fields = {}
    return ModelResult(
        logits=_check_logits(fields.get("logits"), batch_shape, what=what),
        past=fields.get(_PAST_OF_TRANSFORMERS) if fields.get(MODEL_PAST) is None else fields[MODEL_PAST],
        tokens=_check_tokens(fields.get("tokens"), batch_shape[0], what=what),
        sites=dict(fields.get("sites") or {}),
    )


def _check_logits(found: object, batch_shape: tuple[int, int], *, what: str) -> torch.Tensor:
    batch_size, num_columns = batch_shape
    if not isinstance(found, torch.Tensor):
        raise TargetError(
            f"{what} returned no logits",
            expected="logits [B,S,vocab], or [B,1,vocab] of each row's last token",
            found=type(found).__name__,
            next_step=_RETURN_STEP,
        )
    logits: torch.Tensor = found
    require_values(logits, what=f"the logits of {what}")
    if logits.ndim == 2 and logits.shape[0] == batch_size * num_columns:
        logits = logits.unflatten(0, batch_shape)
    elif logits.ndim == 2 and logits.shape[0] == batch_size:
        logits = logits[:, None]
    if logits.ndim != 3 or tuple(logits.shape[:2]) not in (batch_shape, (batch_size, 1)):
        raise TargetError(
            f"{what} returned logits of another shape",
            expected=f"[{batch_size},{num_columns},vocab] or [{batch_size},1,vocab]",
            found=str(list(logits.shape)),
            next_step=_RETURN_STEP,
        )
    return logits


def _check_tokens(tokens: object, batch_size: int, *, what: str) -> torch.Tensor | None:
    if not isinstance(tokens, torch.Tensor) or tokens.numel() == 0:
        return None
    if tokens.numel() != batch_size or tokens.is_floating_point():
        raise TargetError(
            f"{what} returned chosen tokens that do not fit the batch",
            expected=f"token ids [{batch_size}]",
            found=f"{tokens.dtype} {list(tokens.shape)}",
            next_step="Return the next token of each row as `tokens`, or none.",
        )
    return tokens.reshape(batch_size).long()


def past_argument(module: nn.Module) -> str | None:
    """Return the name by which a port's forward accepts the keys and values of earlier passes; None if it does not."""
    return _accepted(module, (MODEL_PAST, _PAST_OF_TRANSFORMERS))


def _accepted(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """Return the first of some names that a module's forward accepts as an argument; None if it accepts none."""
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return next((name for name in names if name in parameters), names[0] if takes_any else None)


def require_decoding(module: nn.Module, *, what: str) -> None:
    """Raise TargetError unless a port can decode: it takes its past, or says that it keeps the cache itself."""
    if past_argument(module) or getattr(module, KEEPS_CACHE, False):
        return
    parameters = inspect.signature(module.forward).parameters
    raise TargetError(
        f"{what} cannot decode: its forward does not accept {MODEL_PAST}",
        expected=f"forward(input_ids, attention_mask, position_ids, {MODEL_PAST}=None), or {KEEPS_CACHE} = True",
        found=f"forward({', '.join(parameters)})",
        next_step=f"Set {KEEPS_CACHE} = True on a port that keeps its cache, or give --decode 0.",
    )


def read_cache(module: nn.Module, past: object, *, num_layers: int) -> list[CachePair] | None:
    """Return keys and values [B,K,P,D] of every layer; None if they cannot be read.

    They come from the port's `read_cache(past)`, or from `past`: transformers' Cache, or a pair for each layer.
    """
    own = getattr(module, READ_CACHE, None)
    pairs: Any = own(past) if callable(own) else _pairs_of(past)
    if not isinstance(pairs, Sequence) or len(pairs) != num_layers:
        return None
    read = [_pair(pair) for pair in pairs]
    return None if any(pair is None for pair in read) else [pair for pair in read if pair is not None]


def _pairs_of(past: object) -> object:
    layers = getattr(past, "layers", None)  # transformers 5
    if isinstance(layers, Sequence):
        return [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    keys, values = getattr(past, "key_cache", None), getattr(past, "value_cache", None)  # transformers 4
    if isinstance(keys, Sequence) and isinstance(values, Sequence):
        return list(zip(keys, values, strict=True))
    return past


def _pair(pair: object) -> CachePair | None:
    if not isinstance(pair, Sequence) or len(pair) < 2:
        return None
    keys, values = pair[0], pair[1]
    are_cached = all(isinstance(tensor, torch.Tensor) and tensor.ndim == 4 for tensor in (keys, values))
    return (keys, values) if are_cached else None

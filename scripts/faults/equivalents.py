"""Equivalents: changes that look like mistakes but leave the layer's output the same; mm2 must fail none of them.

They hide (`hides`) the sites whose values do change, such as those with another order of heads or experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from faults.arithmetic import Arithmetic, KeyValues, Tap
from faults.plant import Kind, Plant, Stage, State, Tensor, in_fused, in_tensors
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.graph import QkNorm
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import (
    K_BIAS,
    K_NORM,
    K_PROJ,
    O_PROJ,
    Q_BIAS,
    Q_NORM,
    Q_PROJ,
    V_BIAS,
    V_PROJ,
)

_ROPE = (Site.Q_ROPE, Site.K_ROPE)
_HEADS = (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ, Site.Q_NORM, Site.K_NORM, *_ROPE, Site.ATTN_CONTEXT)
_ROUTER = (Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)


def _heads_permuted(tensors: LayerTensors, config: Any) -> None:
    """Put the kv groups in reverse order, in all matrices."""
    groups = config.num_key_value_heads
    of_each_head = (Q_NORM, K_NORM) if config.graph.qk_norm is not QkNorm.ALL_HEADS else ()
    for name in (Q_PROJ, K_PROJ, V_PROJ, Q_BIAS, K_BIAS, V_BIAS, Q_NORM, K_NORM):
        if name in tensors and name not in of_each_head:
            tensors[name] = tensors[name].unflatten(0, (groups, -1)).flip(0).flatten(0, 1)
    tensors[O_PROJ] = tensors[O_PROJ].unflatten(1, (groups, -1)).flip(1).flatten(1)


def _width_permuted(state: State) -> None:
    """Put the channels inside every expert in reverse order, in all of its matrices."""
    if "gate_up" not in state:
        # A dense layer.
        return
    state["gate_up"] = state["gate_up"].unflatten(1, (2, -1)).flip(2).flatten(1, 2)
    state["down"] = state["down"].flip(2)


def _experts_permuted(state: State) -> None:
    """Give the experts other numbers, in the router too."""
    for name in ("gate", "bias", "gate_up", "down"):
        if name in state:
            state[name] = state[name].flip(0)


def _other_padding(
    right: Stage,
    _: Arithmetic,
    states: Tensor,
    mask: Tensor,
    positions: Tensor,
    past: KeyValues | None,
    tap: Tap,
) -> tuple[Tensor, KeyValues]:
    """Move the padding to the other side before the layer, and back behind it."""
    assert past is None, "decoded tokens are not moved"
    length = mask.shape[1]
    places = torch.arange(length, device=mask.device)
    # A prompt moves by the length of its padding: right if it is padded on the right, else left. A prompt that is
    # padded on the right begins with a real token, whose mask is 1: 2 · 1 − 1 = 1. Else 2 · 0 − 1 = −1.
    shift = (length - mask.sum(-1)) * (2 * mask[:, 0] - 1)
    there = (places[None] - shift[:, None]) % length
    back = (places[None] + shift[:, None]) % length

    def tap_moved(site: str, value: Tensor) -> Tensor:
        """Show a site's value [T,…], [B,S,…] or [B,heads,S,D] with its padding moved back; return it as it is."""
        if value.ndim == 2:
            shown = _move(value.unflatten(0, mask.shape), back, dim=1).flatten(0, 1)
        else:
            shown = _move(value, back, dim=2 if value.ndim == 4 else 1)
        tap(site, shown)
        return value

    output, (keys, values) = right(
        _move(states, there, dim=1), mask.gather(1, there), positions.gather(1, there), None, tap_moved
    )
    return _move(output, back, dim=1), (_move(keys, back, dim=2), _move(values, back, dim=2))


def _move(value: Tensor, places: Tensor, *, dim: int) -> Tensor:
    """Take the tokens of dim `dim` of [B,…] from other places in their prompt, int64 [B,S]."""
    shape = [1] * value.ndim
    shape[0], shape[dim] = places.shape
    return value.gather(dim, places.view(shape).expand(value.shape))


def _reverse_order(_: Stage, __: Arithmetic, total: Tensor, outputs: Tensor) -> Tensor:
    """Add up the experts from the last to the first."""
    for output in outputs.flip(0):
        total = total + output
    return total


def _norm_weight_float32(_: Stage, layer: Arithmetic, states: Tensor, weight: Tensor) -> Tensor:
    """Multiply the norms' weights in float32, and round after it."""
    exact = states.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + layer.eps())
    return (exact * weight.float()).to(states.dtype)


# Attention sees only differences of positions.
_OFFSET = {"angles": lambda right, _, positions: right(positions + 3)}
_GARBAGE = {"finish_moe": lambda _, __, moe, mask: torch.where(mask[:, :, None].bool(), moe, 1000.0)}
# As transformers 4.57 does.
_WEIGHTS_ROUNDED = {"balance": lambda right, _, chosen: right(chosen).bfloat16().float()}
# The norm of the queries holds a part of attention's scale.
_SCALE_IN_QUERIES: dict[str, Stage] = {
    "q_norm": lambda right, _, flat: right(flat) * 0.25,
    "attention_scores": lambda right, _, q, k: right(q, k) * 4,
}
_FLOAT32 = {"activate": lambda right, _, gate, up: right(gate.float(), up.float()).to(gate.dtype)}

_plant = partial(Plant, sites=(Site.OUTPUT,), kind=Kind.EQUIVALENT)  # sites: where the effect is measured
PLANTS = (
    _plant("positions_offset", stages=_OFFSET, hides=_ROPE),
    _plant("padding_garbage", stages=_GARBAGE),
    _plant("weights_bfloat16", stages=_WEIGHTS_ROUNDED),
    _plant("heads_permuted", stages={"edit": in_tensors(_heads_permuted)}, hides=_HEADS),
    _plant("width_permuted", stages={"fuse": in_fused(_width_permuted)}),
    _plant("experts_permuted", stages={"fuse": in_fused(_experts_permuted)}, hides=_ROUTER),
    _plant("other_padding", stages={"run": _other_padding}),
    _plant(
        "queries_hold_the_scale",
        stages=_SCALE_IN_QUERIES,
        hides=(Site.Q_NORM, Site.Q_ROPE),
        only_with={"has_qk_norm": True},
    ),
    _plant("experts_in_reverse_order", stages={"accumulate": _reverse_order}),
    _plant(
        "norm_weight_float32",
        stages={"normalise": _norm_weight_float32},
        only_with={"has_gain_of_one_plus": False},
    ),
    _plant("activation_float32", stages=_FLOAT32),
)

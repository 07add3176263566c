"""Mistakes of the router and the experts, and of reading FP8 weights.

A line has the name in the catalogue, the sites that must be blamed, the stages of `Arithmetic` that are replaced, and
the parameters. With `decodes` a mistake is also planted in decoded tokens alone.

T tokens of all prompts, k experts of each. `experts` are their numbers [T,k], and `real` is bool [T], false on padding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from faults.arithmetic import Arithmetic
from faults.plant import Plant, Stage, State, Tensor, in_fused, in_tensors
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.graph import RouterScores
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import (
    ATTENTION_MATRICES,
    GATE,
    expert_weight,
    layer_prefix,
    scale_name,
)

_LOGITS, _EXPERTS, _WEIGHTS = (Site.ROUTER_LOGITS,), (Site.ROUTER_EXPERTS,), (Site.ROUTER_WEIGHTS,)
_ROUTED, _MOE = (Site.ROUTED_DELTA,), (Site.MOE_DELTA,)
# Options of the models in which something is a mistake.
_SIGMOID, _CORRECTION_BIAS = {"router_scores": RouterScores.SIGMOID}, {"has_correction_bias": True}
_FLOAT32_ROUTER = {"has_float32_router": True}
_PLAIN_SWIGLU, _SWIGLU_OAI = ({"has_swiglu_oai": is_oai} for is_oai in (False, True))
_SHARED = {"has_shared_experts": True}
_SCALED_SUM = {**_SHARED, "has_sum_scale": True}
_BLOCK = 128  # rows and columns of an FP8 block with one scale
_GROUP = 128  # numbers of a row, or channels of a token, with one scale
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def _gate_low_precision(_: Stage, layer: Arithmetic, tokens: Tensor) -> Tensor:
    """Compute the product of the gate in BF16."""
    return (tokens.bfloat16() @ layer.weights.gate.bfloat16().T).float()


def _gate_rounded(tensors: LayerTensors, _: Any) -> None:
    """Round the gate's weight to BF16, which is multiplied in float32."""
    tensors[GATE] = tensors[GATE].bfloat16().float()


def _gate_quantised(tensors: LayerTensors, _: Any, *, bits: int) -> None:
    """Quantise the gate, as if it were missing from the modules that must not be."""
    tensors[GATE] = _as_fp8(tensors[GATE]) if bits == 8 else _as_int4(tensors[GATE])


def _as_fp8(weight: Tensor) -> Tensor:
    """Round to E4M3 and back, with a scale per block of 128 × 128."""
    result = torch.empty_like(weight)
    for top in range(0, weight.shape[0], _BLOCK):
        for left in range(0, weight.shape[1], _BLOCK):
            block = (slice(top, top + _BLOCK), slice(left, left + _BLOCK))
            scale = weight[block].abs().amax() / _LARGEST_FP8
            result[block] = (weight[block] / scale).to(torch.float8_e4m3fn).float() * scale
    return result


def _as_int4(weight: Tensor) -> Tensor:
    """Round to whole numbers from -7 to 7 and back, with a scale per 128 numbers of a row."""
    groups = weight.unflatten(-1, (-1, math.gcd(_GROUP, weight.shape[-1])))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    rounded: Tensor = (groups / scale).round().clamp(-7, 7) * scale
    return rounded.flatten(-2)


def _biased_weights(_: Stage, layer: Arithmetic, logits: Tensor, experts: Tensor) -> Tensor:
    """Weigh the experts by biased scores."""
    return layer.balance((layer.scores(logits) + layer.bias()).gather(-1, experts))


def _weights_on_input(right: Stage, _: Arithmetic, tokens: Tensor, slab: slice, shares: Tensor) -> Any:
    """Multiply the experts' input by the routing weights [slab,T,1], 0 if not chosen, and not their output."""
    return right(tokens * shares.to(tokens.dtype), slab, (shares != 0).float())


_WEIGHTS_SCALED = {"balance": lambda right, _, chosen, *, factor: right(chosen) * factor}
_OTHER_TOP_K = {"best": lambda _, __, biased, *, k: biased.topk(k, dim=-1).indices}
# Raw logits plus the bias choose the experts; their weights are right.
_SIGMOID_MISSING: dict[str, Stage] = {
    "scores": lambda _, __, logits: logits,
    "weigh": lambda _, layer, logits, experts: layer.balance(logits.sigmoid().gather(-1, experts)),
}

_ROUTER = (
    Plant(
        "router_softmax",
        (*_EXPERTS, *_WEIGHTS),
        {"scores": lambda _, __, logits: logits.softmax(-1)},
        decodes=True,
        only_with=_SIGMOID,
    ),
    Plant(
        "router_sigmoid",
        _WEIGHTS,
        {"scores": lambda _, __, logits: logits.float().sigmoid()},
        decodes=True,
        only_with={"router_scores": RouterScores.SOFTMAX},
    ),
    *(
        Plant(name, sites, stages, decodes=decodes, only_with=_CORRECTION_BIAS)
        for name, sites, stages, decodes in (
            ("router_bias_missing", _EXPERTS, {"bias": lambda right, _: torch.zeros_like(right())}, True),
            (
                "router_bias_low_precision",
                _EXPERTS,
                {"bias": lambda right, _: right().bfloat16().float()},
                False,
            ),
            ("router_bias_negated", _EXPERTS, {"bias": lambda right, _: -right()}, False),
            ("router_bias_in_weights", _WEIGHTS, {"weigh": _biased_weights}, True),
        )
    ),
    Plant(
        "router_weights_not_normalised",
        _WEIGHTS,
        {"balance": lambda _, layer, chosen: chosen * layer.graph.share_scale},
        only_with={"normalises_shares": True},
    ),
    Plant(
        "router_weights_normalised",
        _WEIGHTS,
        {"balance": lambda _, layer, chosen: chosen / chosen.sum(-1, keepdim=True) * layer.graph.share_scale},
        only_with={"normalises_shares": False},
    ),
    Plant("router_weights_scaled", _WEIGHTS, _WEIGHTS_SCALED, {"factor": 2.5}, decodes=True),
    Plant("router_weights_scaled", _WEIGHTS, _WEIGHTS_SCALED, {"factor": 0.95}),
    Plant("router_top_k", _EXPERTS, _OTHER_TOP_K, {"k": 3}),
    Plant("router_top_k", _EXPERTS, _OTHER_TOP_K, {"k": 2}),
    Plant("router_low_precision", _LOGITS, {"logits": _gate_low_precision}, only_with=_FLOAT32_ROUTER),
    Plant(
        "router_gate_low_precision", _LOGITS, {"edit": in_tensors(_gate_rounded)}, only_with=_FLOAT32_ROUTER
    ),
    Plant("router_quantised", _LOGITS, {"edit": in_tensors(_gate_quantised)}, {"bits": 8}),
    Plant("router_quantised", _LOGITS, {"edit": in_tensors(_gate_quantised)}, {"bits": 4}),
    Plant("router_weights_on_input", _ROUTED, {"expert_outputs": _weights_on_input}),
    Plant(
        "router_softmax_of_chosen",
        _WEIGHTS,
        {
            "weigh": lambda _, layer, logits, experts: (
                layer.graph.share_scale * logits.gather(-1, experts).softmax(-1)
            )
        },
        only_with=_SIGMOID,
    ),
    Plant(
        "router_weights_uniform",
        _WEIGHTS,
        {
            "balance": lambda _, layer, chosen: torch.full_like(
                chosen, layer.graph.share_scale / chosen.shape[-1]
            )
        },
    ),
    Plant(
        "router_sigmoid_missing",
        _EXPERTS,
        _SIGMOID_MISSING,
        only_with={**_SIGMOID, **_CORRECTION_BIAS},
    ),
)


def _clamped(right: Stage, _: Arithmetic, gate: Tensor, up: Tensor, *, limit: float) -> Any:
    """Clamp gate and up, as another model's are."""
    return right(gate.clamp(max=limit), up.clamp(-limit, limit))


def _up_clamped(right: Stage, _: Arithmetic, gate: Tensor, up: Tensor, *, limit: float, side: str) -> Any:
    """Clamp the up projection alone."""
    return right(gate, up.clamp(min=-limit if side == "both" else None, max=limit))


def _exchanged(tensors: LayerTensors, _: Any, *, first: int, second: int) -> None:
    """Let two experts hold each other's weights."""
    for matrix in ("w1", "w2", "w3"):
        one, other = (expert_weight(expert, matrix) for expert in (first, second))
        tensors[one], tensors[other] = tensors[other], tensors[one]


def _of_rank(right: Stage, layer: Arithmetic, *chosen: Tensor, ep_degree: int, rank: int) -> Any:
    """Let the experts of a single rank compute; the sum over ranks is missing."""
    shares = right(*chosen)
    numbers = torch.arange(layer.config.num_local_experts, device=shares.device)
    is_local = numbers // (layer.config.num_local_experts // ep_degree) == rank
    return shares * is_local.to(shares.dtype)


def _shifted(
    right: Stage, layer: Arithmetic, experts: Tensor, weights: Tensor, real: Tensor, *, offset: int
) -> Any:
    """Let a shifted expert compute, and not the chosen one."""
    return right((experts + offset) % layer.config.num_local_experts, weights, real)


def _text_order(state: State) -> None:
    """Stack the experts in the order of their numbers as text: 0, 1, 10, 11, …, 2."""
    order = sorted(range(len(state["down"])), key=str)
    for name in ("gate_up", "down"):
        state[name] = state[name][order]


def _within_capacity(
    right: Stage, layer: Arithmetic, experts: Tensor, weights: Tensor, real: Tensor, *, factor: float
) -> Tensor:
    """Let an expert take `factor` times its even share of the tokens, the first ones, and drop the others."""
    wanted = right(experts, weights, real) * real[:, None]
    share = factor * layer.config.num_experts_per_tok / layer.config.num_local_experts
    capacity = (real.sum() * share).ceil()
    return torch.where((wanted > 0).cumsum(0) <= capacity, wanted, 0.0)


def _width_of_rank(
    right: Stage, _: Arithmetic, tokens: Tensor, slab: slice, *, tp_degree: int, rank: int
) -> Any:
    """Let a single rank's slice of the experts' width compute; the sum over ranks is missing."""
    inner = right(tokens, slab)
    width = inner.shape[-1] // tp_degree
    is_local = torch.arange(inner.shape[-1], device=inner.device) // width == rank
    return inner * is_local.to(inner.dtype)


def _low_precision_sum(_: Stage, __: Arithmetic, total: Tensor, outputs: Tensor) -> Tensor:
    """Round the sum to BF16 after each expert."""
    for output in outputs:
        total = (total + output).bfloat16().float()
    return total


def _oai_unclamped(_: Stage, layer: Arithmetic, gate: Tensor, up: Tensor) -> Tensor:
    """Compute SwiGLU-OAI without its clamps."""
    return gate * torch.sigmoid(gate * layer.alpha()) * (up + 1)


def _oai_without_one(_: Stage, layer: Arithmetic, gate: Tensor, up: Tensor, **__: str) -> Tensor:
    """Compute SwiGLU-OAI without the 1 that is added to up."""
    gate, up = layer.clamp(gate, up)
    return gate * torch.sigmoid(gate * layer.alpha()) * up


def plain_swiglu(_: Stage, __: Arithmetic, gate: Tensor, up: Tensor, **___: str) -> Tensor:
    """Compute SwiGLU where SwiGLU-OAI belongs."""
    return functional.silu(gate) * up


def _oai_without_alpha(_: Stage, layer: Arithmetic, gate: Tensor, up: Tensor) -> Tensor:
    """Compute SwiGLU-OAI with 1 for its alpha."""
    gate, up = layer.clamp(gate, up)
    return gate * torch.sigmoid(gate) * (up + 1)


_SHARED_ZERO: dict[str, Stage] = {
    "run_shared": lambda right, _, tokens, **__: torch.zeros_like(right(tokens))
}
_SHARED_NOT_ADDED: dict[str, Stage] = {
    "add_shared": lambda _, layer, routed, shared, **__: layer.scale_routed(routed)
}
_SHARED_TWICE: dict[str, Stage] = {"add_shared": lambda right, _, routed, shared: right(routed, 2 * shared)}
_SHARED_SCALED: dict[str, Stage] = {
    "add_shared": lambda _, layer, routed, shared: layer.scale_routed(routed + shared)
}
_UNSCALED: dict[str, Stage] = {"scale_routed": lambda _, __, routed: routed}
_CLAMPED, _UP_CLAMPED = {"activate": _clamped}, {"activate": _up_clamped}
_CAPACITY = {"affinities": _within_capacity}
_MOE_SCALED = {"finish_moe": lambda _, __, moe, mask, *, factor: moe * factor}

_OF_EXPERTS = (
    Plant("gate_up_swapped", _ROUTED, {"activate": lambda right, _, gate, up: right(up, gate)}, decodes=True),
    # The SwiGLU of another model.
    Plant(
        "up_plus_one",
        _ROUTED,
        {"activate": lambda right, _, gate, up: right(gate, up + 1)},
        only_with=_PLAIN_SWIGLU,
    ),
    Plant(
        "gelu_activation",
        _ROUTED,
        {"activate": lambda _, __, gate, up: functional.gelu(gate) * up},
        decodes=True,
        only_with=_PLAIN_SWIGLU,
    ),
    *(
        Plant(name, _ROUTED, stages, parameters, only_with=_PLAIN_SWIGLU)
        for name, stages, parameters in (
            ("relu_activation", {"activate": lambda _, __, gate, up: functional.relu(gate) * up}, {}),
            ("activation_missing", {"activate": lambda _, __, gate, up: gate * up}, {}),
            ("swiglu_clamped", _CLAMPED, {"limit": 1.0}),
            ("swiglu_clamped", _CLAMPED, {"limit": 7.0}),
            ("up_clamped", _UP_CLAMPED, {"limit": 0.7, "side": "both"}),
        )
    ),
    Plant(
        "up_clamped",
        _ROUTED,
        _UP_CLAMPED,
        {"limit": 1.0, "side": "above"},
        decodes=True,
        only_with=_PLAIN_SWIGLU,
    ),
    *(
        Plant(name, _ROUTED, {"activate": activate}, decodes=True, only_with=_SWIGLU_OAI)
        for name, activate in (
            ("up_plus_one_missing", _oai_without_one),
            ("swiglu_clamp_missing", _oai_unclamped),
            ("swiglu_alpha_missing", _oai_without_alpha),
            ("swiglu_plain", plain_swiglu),
        )
    ),
    *(
        Plant(name, (site,), {"activate_mlp": activate}, {"mlp": mlp}, only_with=options)
        for site, mlp in ((Site.SHARED_DELTA, "shared experts"), (Site.MLP_DELTA, "dense layer"))
        for name, activate, options in (
            ("mlp_gate_up_swapped", lambda right, _, gate, up, **__: right(up, gate), {}),
            ("mlp_up_plus_one_missing", _oai_without_one, _SWIGLU_OAI),
            ("mlp_swiglu_plain", plain_swiglu, _SWIGLU_OAI),
        )
    ),
    Plant(
        "dense_mlp_zero",
        (Site.MLP_DELTA,),
        {"run_mlp": lambda right, _, tokens: torch.zeros_like(right(tokens))},
    ),
    *(
        Plant(name, sites, stages, parameters, decodes=True, only_with=options)
        for name, sites, stages, parameters, options in (
            ("shared_missing", (Site.SHARED_DELTA,), _SHARED_ZERO, {"where": "shared experts"}, {}),
            ("shared_missing", _MOE, _SHARED_NOT_ADDED, {"where": "sum"}, _SHARED),
            ("shared_twice", _MOE, _SHARED_TWICE, {}, _SHARED),
            ("shared_scaled_too", _MOE, _SHARED_SCALED, {}, _SCALED_SUM),
            ("routed_scale_missing", _MOE, _UNSCALED, {}, _SCALED_SUM),
        )
    ),
    Plant("experts_exchanged", _ROUTED, {"edit": in_tensors(_exchanged)}, {"first": 5, "second": 6}),
    # Gate and up are taken to alternate in the fused weight's rows, the last axis of its product.
    Plant(
        "gate_up_interleaved",
        _ROUTED,
        {"cut_gate_up": lambda _, __, both: (both[..., 0::2], both[..., 1::2])},
    ),
    Plant("experts_local_only", _ROUTED, {"affinities": _of_rank}, {"ep_degree": 4, "rank": 0}, decodes=True),
    Plant("expert_ids_shifted", _ROUTED, {"affinities": _shifted}, {"offset": 1}),
    Plant("experts_in_text_order", _ROUTED, {"fuse": in_fused(_text_order)}),
    Plant("expert_capacity", _ROUTED, _CAPACITY, {"factor": 1.0}),
    Plant("expert_capacity", _ROUTED, _CAPACITY, {"factor": 1.25}),
    # 2 if two ranks' sums are reduced twice, or another wrong scale.
    Plant("moe_delta_scaled", _MOE, _MOE_SCALED, {"factor": 2.0}, decodes=True),
    Plant("moe_delta_scaled", _MOE, _MOE_SCALED, {"factor": 0.97}),
    Plant("experts_width_partial", _ROUTED, {"activated": _width_of_rank}, {"tp_degree": 2, "rank": 0}),
    Plant("expert_accumulation_low_precision", _ROUTED, {"accumulate": _low_precision_sum}),
)

# Site that is wrong if a matrix is read wrongly.
_SITES = {
    "q_proj": Site.Q_PROJ,
    "k_proj": Site.K_PROJ,
    "v_proj": Site.V_PROJ,
    "o_proj": Site.ATTN_DELTA,
    "w1": Site.ROUTED_DELTA,
    "w2": Site.ROUTED_DELTA,
    "w3": Site.ROUTED_DELTA,
}
_ALL_SITES = tuple(dict.fromkeys(_SITES.values()))


def _misread(plant: str, sites: tuple[Site, ...], read: Stage, **parameters: Any) -> Plant:
    """Build a plant that reads FP8 matrices by `read(codes, scales)`: those of the parameter `tensor`, else all."""

    def edit(tensors: LayerTensors, config: Any, *, tensor: str | None = None, **others: Any) -> None:
        for name in _matrices(config, tensor):
            on_hub = layer_prefix(tensors.layer) + name
            codes, scale = tensors.reader.read(on_hub), tensors.reader.read(scale_name(on_hub))
            tensors[name] = read(codes.float(), scale, **others).to(tensors.given_dtype(name))

    return Plant(plant, sites, {"edit": in_tensors(edit)}, parameters, needs_fp8=True)


def _matrices(config: Any, tensor: str | None) -> list[str]:
    experts = range(config.num_local_experts)
    if tensor is None:
        matrices = [expert_weight(expert, matrix) for expert in experts for matrix in ("w1", "w2", "w3")]
        return [*ATTENTION_MATRICES, *matrices]
    if tensor.startswith("w"):
        return [expert_weight(expert, tensor) for expert in experts]
    return [f"self_attn.{tensor}.weight"]


def _spread(scale: Tensor, codes: Tensor) -> Tensor:
    """Spread the scales of blocks over the codes [R,C]; blocks at the edges may be smaller."""
    wide = scale.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    return wide[: codes.shape[0], : codes.shape[1]]


def _clipped(codes: Tensor, scale: Tensor, *, limit: float) -> Tensor:
    """Clip codes, of up to ±448, to the range of another format."""
    return codes.clamp(-limit, limit) * _spread(scale, codes)


def _power_of_two(codes: Tensor, scale: Tensor) -> Tensor:
    """Round the scales up to a power of two after quantising."""
    return codes * _spread(torch.exp2(scale.log2().ceil()), codes)


def _transposed(codes: Tensor, scale: Tensor) -> Tensor:
    """Read the grid of scales column by column."""
    return codes * _spread(scale.T.reshape(scale.shape), codes)


def _fp8_inputs(right: Stage, _: Arithmetic, tokens: Tensor, slab: slice) -> Tensor:
    """Round the inputs of the experts' products to FP8."""
    return _round_to_fp8(right(_round_to_fp8(tokens), slab))


def _round_to_fp8(states: Tensor) -> Tensor:
    """Round to E4M3 and back, with a scale per group of 128 channels, or fewer if 128 does not divide the width."""
    groups = states.float().unflatten(-1, (-1, math.gcd(_GROUP, states.shape[-1])))
    # The least scale keeps groups of zeros from 0 / 0.
    scale = (groups.abs().amax(-1, keepdim=True) / _LARGEST_FP8).clamp(min=1e-12)
    rounded: Tensor = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2).to(states.dtype)


_FP8 = (
    *(
        _misread("fp8_scale_missing", (site,), lambda codes, _: codes, tensor=tensor)
        for tensor, site in _SITES.items()
    ),
    *(
        _misread(
            "fp8_scale_averaged", (_SITES[tensor],), lambda codes, scale: codes * scale.mean(), tensor=tensor
        )
        for tensor in ("q_proj", "o_proj", "w1", "w2")
    ),
    _misread("fp8_clipped", _ALL_SITES, _clipped, limit=240),
    _misread("fp8_scale_power_of_two", _ALL_SITES, _power_of_two),
    *(
        _misread("fp8_scale_transposed", (_SITES[tensor],), _transposed, tensor=tensor)
        for tensor in ("q_proj", "o_proj")
    ),
    Plant("fp8_activations", _ROUTED, {"activated": _fp8_inputs}),
)

PLANTS = (*_ROUTER, *_OF_EXPERTS, *_FP8)

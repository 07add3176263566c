"""Ports of 22 public reports: each names the thread that it follows, and the catalogue's names that are true of it.

B prompts, S tokens of each, T tokens of all, E experts, k of them per token, I their width, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from faults.arithmetic import Arithmetic
from faults.plant import Plant, Stage, State, Tensor, replace_fused, replace_stages, replace_weights
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site

_MOE, _EXPERTS, _CONTEXT = (Site.MOE_DELTA,), (Site.ROUTER_EXPERTS,), (Site.ATTN_CONTEXT,)
_NUM_RANKS = 2


def _factors(count: int, low: float, high: float) -> Tensor:
    """Draw a factor for each expert, [count,1,1]."""
    drawn = torch.rand(count, 1, 1, generator=torch.Generator().manual_seed(count))
    return low + (high - low) * drawn


def _scale(state: State, matrix: str, low: float, high: float) -> None:
    """Scale one matrix of each expert by its own factor."""
    gate, up = state["gate_up"].chunk(2, 1)
    part = {"w1": gate, "w3": up, "w2": state["down"]}[matrix]
    part.copy_((part.float() * _factors(len(part), low, high)).to(part.dtype))


def _reorder(state: State, order: Callable[[int], Tensor]) -> None:
    places = order(len(state["down"]))
    for name in ("gate_up", "down"):
        state[name] = state[name][places]


def _shuffled(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))


def _last_before_last(count: int) -> Tensor:
    return torch.cat((torch.arange(count - 1), torch.tensor([count - 2])))


def _zero(state: State, *experts: int) -> None:
    state["down"][list(experts)] = 0


def _interleave_half(state: State) -> None:
    """Let gate and up rows take turns in the second half of the experts."""
    half = len(state["gate_up"]) // 2
    later = state["gate_up"][half:]
    state["gate_up"][half:] = torch.stack(later.chunk(2, 1), 2).flatten(1, 2)


def _transpose_call(right: Stage, _: Any, moe: Tensor, mask: Tensor) -> Any:
    """Read [S,B,H] as [B,S,H]."""
    return right(moe, mask).transpose(0, 1).reshape(moe.shape)


def _unpermute_twice(right: Stage, _: Any, tokens: Tensor, experts: Tensor, *rest: Any) -> Any:
    """Put sorted tokens back by the order of the sort, and not by its inverse."""
    order = experts[:, 0].argsort(stable=True)
    return right(tokens, experts, *rest)[order][order]


def _add_parts_of_ranks(
    right: Stage, layer: Any, tokens: Tensor, experts: Tensor, weights: Tensor, real: Tensor
) -> Tensor:
    """Divide tokens and the experts' width among ranks, and add what the ranks give."""
    size = -(-len(tokens) // _NUM_RANKS)
    total = torch.zeros(size, tokens.shape[1])
    for rank in range(_NUM_RANKS):
        own = slice(rank * size, (rank + 1) * size)
        layer.rank = rank
        part = right(tokens[own], experts[own], weights[own], real[own]).float()
        total[: len(part)] += part
    return total.to(tokens.dtype).repeat(_NUM_RANKS, 1)[: len(tokens)]


def _activate_on_rank(right: Stage, layer: Any, tokens: Tensor, slab: slice) -> Tensor:
    inner = right(tokens, slab)
    is_own = torch.arange(inner.shape[-1]) * _NUM_RANKS // inner.shape[-1] == layer.rank
    own: Tensor = inner * is_own.to(inner.dtype)
    return own


def _add_heads_of_ranks(right: Stage, layer: Arithmetic, context: Tensor) -> Any:
    """Divide tokens and heads among ranks behind attention, and add what the ranks give."""
    flat, weight = context.flatten(0, 1), layer.weights.o_proj
    size, width = len(flat) // _NUM_RANKS, weight.shape[1] // _NUM_RANKS
    parts = [
        functional.linear(
            flat[size * rank :][:size, width * rank :][:, :width], weight[:, width * rank :][:, :width]
        )
        for rank in range(_NUM_RANKS)
    ]
    return (
        torch.stack(parts).float().sum(0).to(context.dtype).repeat(_NUM_RANKS, 1).view(*context.shape[:2], -1)
    )


def _choose_from_groups(masked: float) -> Stage:
    def best(right: Stage, _: Any, biased: Tensor) -> Any:
        num_groups = 8 if biased.shape[-1] >= 16 else 4
        groups = biased.unflatten(-1, (num_groups, -1))
        kept = groups.topk(2, dim=-1).values.sum(-1).topk(num_groups // 2, dim=-1).indices
        is_kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(-1, kept, True)
        return right(torch.where(is_kept[..., None], groups, masked).flatten(-2))

    return best


def _divide_key_by_eps(_: Any, layer: Arithmetic, flat: Tensor) -> Tensor:
    divided: Tensor = flat.float() / math.sqrt(layer.eps())
    return layer.weights.k_norm * divided.to(flat.dtype)


def _cap(right: Stage, _: Any, q: Tensor, k: Tensor) -> Tensor:
    return 2 * torch.tanh(right(q, k) / 2)


def _keep_within_capacity(
    right: Stage, layer: Arithmetic, experts: Tensor, weights: Tensor, real: Any
) -> Tensor:
    shares = right(experts, weights, real)
    is_chosen = functional.one_hot(experts, shares.shape[1]).sum(1)
    capacity = -(-experts.numel() // shares.shape[1])
    return torch.where(is_chosen.cumsum(0) <= capacity, shares, 0.0)


def _int8_rows(tensors: LayerTensors, _: Any) -> None:
    gate = tensors[weight_names.GATE]
    scale = gate.abs().amax(-1, keepdim=True) / 127
    tensors[weight_names.GATE] = (gate / scale).round() * scale


def _smooth(tensors: LayerTensors, config: Any, *, gate: bool, experts: bool) -> None:
    """Divide the norm before the experts by a scale per channel, and multiply some of its readers."""
    drawn = torch.randn(config.hidden_size, generator=torch.Generator().manual_seed(17))
    scale = torch.exp2((drawn * 1.4).round() / 2)
    tensors[weight_names.POST_NORM] = (tensors[weight_names.POST_NORM].float() / scale).bfloat16()
    if gate:
        tensors[weight_names.GATE] = tensors[weight_names.GATE] * scale
    for expert in range(config.num_local_experts if experts else 0):
        for matrix in ("w1", "w3"):
            name = weight_names.expert_weight(expert, matrix)
            tensors[name] = (tensors[name].float() * scale).bfloat16()


def _norm_half(_: Any, layer: Arithmetic, flat: Tensor, weight: Tensor) -> Tensor:
    ones = torch.ones((), dtype=weight.dtype)
    return weight * layer.normalise(flat.unflatten(-1, (2, -1)), ones).flatten(-2)


def _swap(state: State) -> None:
    state["gate_up"] = torch.cat(state["gate_up"].chunk(2, 1)[::-1], 1)
    state["bias"] = state["bias"].bfloat16().float()


PLANTS: tuple[Plant, ...] = (
    replace_fused("vllm#54974", lambda state: _scale(state, "w3", 0.8, 1.25), "experts_scaled"),
    replace_fused("TensorRT-LLM#14199", lambda state: _scale(state, "w3", 0.97, 1.03), "experts_scaled"),
    replace_fused("TensorRT-LLM#12214", lambda state: _scale(state, "w1", 0.8, 1.25), "experts_scaled"),
    replace_fused("sglang#32962", lambda state: state["down"][:3].mul_(2), "experts_counted_twice"),
    replace_fused("sglang#18213", lambda state: _reorder(state, _shuffled), "experts_rearranged"),
    replace(
        replace_fused("vllm#52639", lambda state: _reorder(state, _last_before_last), "experts_of_others"),
        told="in their place",
    ),
    replace_fused("vllm-gaudi#1796", lambda state: _zero(state, 3, 5, 6), "experts_missing"),
    replace_fused("sglang#32430", _interleave_half, "gate_up_cut_in_halves"),
    replace_stages("transformers-neuronx#106", _MOE, "tokens_rearranged", finish_moe=_transpose_call),
    replace_stages("Megatron-LM#5231", _MOE, "tokens_rearranged", mix_experts=_unpermute_twice),
    replace_stages(
        "sglang#23729",
        _MOE,
        "tokens_rearranged",
        finish_moe=lambda right, _, moe, mask: right(moe, mask).flip(0),
    ),
    replace_stages(
        "vllm#58061",
        _MOE,
        "ranks_add_other_tokens",
        mix_experts=_add_parts_of_ranks,
        activated=_activate_on_rank,
    ),
    replace_stages(
        "vllm-ascend#16804", (Site.ATTN_DELTA,), "ranks_add_other_tokens", project_out=_add_heads_of_ranks
    ),
    replace_stages(
        "vllm-ascend#12642", (Site.K_NORM,), "norm_mean_square_missing", k_norm=_divide_key_by_eps
    ),
    replace_stages("vllm#13474", _EXPERTS, "router_groups", best=_choose_from_groups(float("-inf"))),
    replace_weights("auto-round#1486", (Site.ROUTER_LOGITS,), _int8_rows, "router_quantised"),
    replace_stages("vllm#31478", _CONTEXT, "attention_soft_cap", attention_scores=_cap),
    replace_stages("Megatron-LM#6045", _MOE, "expert_capacity", affinities=_keep_within_capacity),
    replace_fused("vllm#50761", _swap, "gate_up_swapped", "router_bias_low_precision"),
    replace_stages("mlx-lm#898", (Site.Q_NORM, Site.K_NORM), "qk_norm_per_rank", head_norm=_norm_half),
    replace(
        replace_weights(
            "llm-compressor#2451", (Site.ROUTER_LOGITS,), lambda t, c: _smooth(t, c, gate=False, experts=True)
        ),
        told="is undone in moe_delta, and not here",
    ),
    replace(
        replace_weights("llm-compressor#1455", _MOE, lambda t, c: _smooth(t, c, gate=True, experts=False)),
        told="is undone in router_logits, and not here",
    ),
)

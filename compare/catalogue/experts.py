"""Mistakes of the experts: what they compute, which of them do, and how their outputs are added.

T judged tokens, k experts per token, E experts, I intermediate, n tokens of one expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch.nn import functional

from compare.catalogue import repairs
from compare.catalogue.candidates import (
    Parameters,
    each,
    nothing_listed,
    once_if,
    rank_of,
    rank_slices,
    share,
    values_of,
)
from compare.catalogue.clues import Clues, ExpertFactors, parse_experts, scaled_gate, word_experts
from compare.catalogue.low_bits import bfloat16
from compare.catalogue.mistake import Finder, Mistake
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import DENSE_MLP, SHARED_MLP, MlpNames
from minimax_tools.reference.evaluation import (
    Change,
    Evaluation,
    ExpertValue,
    LayerInputs,
    replace_stage,
    scaled,
)
from minimax_tools.reference.expert_pass import ExpertSlots, Mix, Recipe
from minimax_tools.reference.float32_stages import Combine, activate, mlp_stage, swiglu, swiglu_oai

# Limits that other models clamp their experts at, and smaller ones.
_CLAMP_LIMITS = (7.0, 10.0, 5.0, 3.0, 2.0, 1.0, 0.5)

# What of all columns counts as tokens in a capacity, and what takes up room: all and all, real ones and real ones, all
# and real ones, real ones and all.
_COUNTED = ("all", "real", "columns", "room")


def _mix_with(mix: Mix, experts: str = "") -> Change:
    """Combine each expert's gate and up in another way: `mix` gets gate, up [n,I] and its slots."""
    return Change(recipe=Recipe(mix=mix, experts=frozenset(parse_experts(experts)) if experts else None))


def _oai_with(alpha: float, limit: float, added: float = 1.0) -> Change:
    """Combine gate and up by SwiGLU-OAI with these numbers; `added` is what up is added to."""
    return _mix_with(lambda gate, up, _: swiglu_oai(gate, up, alpha=alpha, limit=limit, added=added))


def _alpha(inputs: LayerInputs) -> tuple[Parameters, ...]:
    """Give a mistake of SwiGLU-OAI the model's own alpha."""
    alpha = inputs.spec.graph.swiglu_alpha
    return () if alpha is None else ({"alpha": alpha},)


def _limit(inputs: LayerInputs) -> tuple[Parameters, ...]:
    """Give a mistake of SwiGLU-OAI the model's own limit."""
    return ({"limit": inputs.spec.graph.swiglu_limit},)


def _alpha_and_limit(inputs: LayerInputs) -> tuple[Parameters, ...]:
    """Give a mistake of SwiGLU-OAI the model's own alpha and limit."""
    return tuple({**alpha, **limit} for alpha in _alpha(inputs) for limit in _limit(inputs))


def _add_shared(*, times: float = 1.0, is_scaled: bool = False, scales_routed: bool = True) -> Change:
    """Add the shared experts' sum so many times, or scaled as the routed sum is, or to an unscaled routed sum."""

    def stage(layer: Evaluation) -> torch.Tensor:
        scale = layer.graph.model.sum_scale
        routed = layer[Site.ROUTED_DELTA] * (scale if scales_routed else 1.0)
        return routed + layer[Site.SHARED_DELTA] * times * (scale if is_scaled else 1.0)

    return replace_stage(Site.MOE_DELTA, stage)


# The MLPs that every token takes, as parameters name them.
_MLPS: Mapping[str, tuple[Site, MlpNames]] = MappingProxyType(
    {"shared experts": (Site.SHARED_DELTA, SHARED_MLP), "dense layer": (Site.MLP_DELTA, DENSE_MLP)}
)


def _mlp_with(mlp: str, combine: Combine) -> Change:
    """Combine gate and up of one of `_MLPS` in another way."""
    site, names = _MLPS[mlp]
    return replace_stage(site, mlp_stage(names, combine))


def _oai_without_one(graph: ModelGraph, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return swiglu_oai(gate, up, alpha=graph.swiglu_alpha or 1.0, limit=graph.swiglu_limit, added=0.0)


_SHARED_ZERO = replace_stage(Site.SHARED_DELTA, lambda layer: torch.zeros_like(layer[Site.POST_NORM]))


def _find_some(mix: Mix) -> Finder:
    """Find the experts that combine gate and up in another way while the others are right."""

    def find(clues: Clues) -> tuple[Parameters, ...]:
        some = () if clues.experts is None else clues.experts.experts_with(_mix_with(mix))
        return ({"experts": word_experts(some)},) if some else ()

    return find


def _clamped(limit: float) -> Change:
    return _mix_with(
        lambda gate, up, _: functional.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)
    )


def _up_clamped(limit: float, side: str) -> Change:
    least = -limit if side == "both" else None
    return _mix_with(lambda gate, up, _: swiglu(gate, up.clamp(min=least, max=limit)))


def _swapped(gate: torch.Tensor, up: torch.Tensor, slots: ExpertSlots) -> torch.Tensor:
    return activate(slots.graph, up, gate)


def _cut_as_interleaved(gate: torch.Tensor, up: torch.Tensor, slots: ExpertSlots) -> torch.Tensor:
    """Take the even channels of [gate | up] for gate, and the odd ones for up."""
    fused = torch.cat((gate, up), dim=-1)
    return activate(slots.graph, fused[:, 0::2], fused[:, 1::2])


def _cut_as_halves(gate: torch.Tensor, up: torch.Tensor, slots: ExpertSlots) -> torch.Tensor:
    """Take the first half of channels in which gate and up take turns for gate, and the second half for up."""
    first, second = torch.stack((gate, up), dim=-1).flatten(-2).chunk(2, dim=-1)
    return activate(slots.graph, first, second)


def width_of_rank(degree: int, rank: int) -> Mix:
    """Return how a rank mixes gate and up [T,F]: within its share of the width, zeros elsewhere."""

    def mix(gate: torch.Tensor, up: torch.Tensor, slots: ExpertSlots) -> torch.Tensor:
        part = share(gate.shape[-1], degree, rank)
        mixed = torch.zeros_like(gate)
        mixed[:, part] = activate(slots.graph, gate[:, part], up[:, part])
        return mixed

    return mix


def _renumber(renumber: Callable[[Evaluation, torch.Tensor], torch.Tensor]) -> Change:
    """Use other experts' weights: `renumber` maps the chosen experts, int64 [T,k], to those that compute."""

    def stage(layer: Evaluation) -> torch.Tensor:
        return renumber(layer, layer[Site.ROUTER_EXPERTS])

    return replace_stage(ExpertValue.EXPERT_NUMBERS, stage)


def _text_order(layer: Evaluation, experts: torch.Tensor) -> torch.Tensor:
    """Map each number, such as 2, to the expert at this place in 0, 1, 10, 11, …: here 10."""
    return torch.tensor(sorted(range(layer.spec.num_local_experts), key=str))[experts]


def _exchange(first: int, second: int) -> Callable[[Evaluation, torch.Tensor], torch.Tensor]:
    def renumber(_: Evaluation, experts: torch.Tensor) -> torch.Tensor:
        exchanged = torch.where(experts == first, second, experts)
        return torch.where(experts == second, first, exchanged)

    return renumber


def _sum_only(keeps: Callable[[Evaluation], torch.Tensor]) -> Change:
    """Leave some experts out of the sum: `keeps` returns bool [T,k], True for those that are added."""

    def stage(layer: Evaluation) -> torch.Tensor:
        shares = torch.where(keeps(layer), layer[Site.ROUTER_WEIGHTS], 0.0)
        return (layer[ExpertValue.EXPERT_OUTPUTS] * shares[..., None]).sum(1)

    return replace_stage(ExpertValue.ROUTED_SUM, stage)


def is_on_rank(layer: Evaluation, ep_degree: int, rank: int) -> torch.Tensor:
    """Decide of each chosen expert whether a rank holds it, bool [T,k]."""
    part = share(layer.spec.num_local_experts, ep_degree, rank)
    experts = layer[Site.ROUTER_EXPERTS]
    return experts.ge(part.start) & experts.lt(part.stop)


def _within_capacity(factor: float, counted: str) -> Callable[[Evaluation], torch.Tensor]:
    """Keep the tokens within their expert's capacity: `factor` times the mean number of tokens per expert.

    All tokens of a call count and take up room, judged or not; with `counted` `real`, padding does neither. With
    `columns` it counts alone, and with `room` it takes up room alone.
    """

    def keeps(layer: Evaluation) -> torch.Tensor:
        # The right layer with all B·S tokens; `layer.places` are the indices of the judged ones.
        everywhere = layer.base.everywhere()
        experts = everywhere[Site.ROUTER_EXPERTS]
        is_real = everywhere.attention_mask.flatten().bool()
        is_kept = torch.ones_like(experts, dtype=torch.bool)
        # The last call of a row counts.
        for tokens in everywhere.inputs.tokens_by_call:
            is_of_call = is_real[tokens]
            num_counted = int(is_of_call.sum()) if counted in ("real", "room") else len(is_of_call)
            is_kept[tokens] = _find_within(
                experts[tokens],
                is_of_call if counted in ("real", "columns") else torch.ones_like(is_of_call),
                capacity=math.ceil(factor * num_counted * experts.shape[1] / layer.spec.num_local_experts),
                num_experts=layer.spec.num_local_experts,
            )
        return is_kept[layer.places]

    return keeps


def _find_within(
    experts: torch.Tensor, takes_room: torch.Tensor, *, capacity: int, num_experts: int
) -> torch.Tensor:
    """Return which of the experts [t,k] of a call's tokens have room for them, bool [t,k]; `takes_room` is bool [t]."""
    is_chosen = functional.one_hot(experts, num_experts).sum(1) * takes_room[:, None]
    # Of a token and its expert: how many tokens up to this one chose the expert.
    return is_chosen.cumsum(0).gather(-1, experts) <= capacity


def _sum_in_bfloat16(layer: Evaluation) -> torch.Tensor:
    """Add the experts up in the order of their numbers, rounding after each."""
    order = layer[Site.ROUTER_EXPERTS].argsort(dim=-1)
    weighed = layer[ExpertValue.EXPERT_OUTPUTS] * layer[Site.ROUTER_WEIGHTS][..., None]
    weighed = weighed.gather(1, order[..., None].expand_as(weighed))
    total = torch.zeros(())
    for output in weighed.unbind(1):
        total = bfloat16(total + output)
    return total


def _offsets(inputs: LayerInputs) -> tuple[int, ...]:
    """List distances of expert numbers: 1, of those that count from 1, and the share of one of 2 or 4 ranks."""
    half = inputs.spec.num_local_experts // 2
    return tuple(dict.fromkeys(offset for offset in (1, -1, half, half // 2, -(half // 2)) if offset))


def _capacities(inputs: LayerInputs) -> tuple[Parameters, ...]:
    factors = (1.0, 1.25, 1.5, 2.0, 0.5)
    if bool(inputs.attention_mask.all()):
        return tuple({"factor": factor} for factor in factors)
    return tuple({"factor": factor, "counted": counted} for counted in _COUNTED for factor in factors)


# Matrices whose scale a factor on an expert's output is; that of the gate is activated, and shows in another way.
_LINEAR, _GATE = "w2 or w3", "w1"
_MOST_TOLD = 3  # experts that a sentence tells of


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split()]


def _sum_times(layer: Evaluation, times: torch.Tensor) -> torch.Tensor:
    """Add each expert's output so many times, [E]."""
    shares = layer[Site.ROUTER_WEIGHTS] * times[layer[Site.ROUTER_EXPERTS]]
    return (layer[ExpertValue.EXPERT_OUTPUTS] * shares[..., None]).sum(1)


def _scale(matrix: str, factors: str) -> Change:
    numbers = torch.tensor(_numbers(factors))
    if matrix == _GATE:
        return Change(recipe=scaled_gate(numbers))
    return replace_stage(ExpertValue.ROUTED_SUM, lambda layer: _sum_times(layer, numbers))


def _count(times: int, experts: str) -> Change:
    def stage(layer: Evaluation) -> torch.Tensor:
        counts = torch.ones(layer.spec.num_local_experts)
        counts[list(parse_experts(experts))] = times
        return _sum_times(layer, counts)

    return replace_stage(ExpertValue.ROUTED_SUM, stage)


def _rearranged(order: str) -> Change:
    """Compute chosen number n with the weights of expert `order[n]`."""
    places = torch.tensor([int(place) for place in order.split()])
    return replace_stage(ExpertValue.EXPERT_NUMBERS, lambda layer: places[layer[Site.ROUTER_EXPERTS]])


def _find_factors(clues: Clues) -> ExpertFactors | None:
    """Return the factors on the experts' outputs, if they explain the port and are not all the same."""
    factors = None if clues.experts is None else clues.experts.factors
    return factors if factors is not None and factors.differ else None


def _find_scales(clues: Clues) -> tuple[Parameters, ...]:
    factors = _find_factors(clues)
    if factors is None or bool(factors.are_whole.all()):
        return ()
    return ({"matrix": _LINEAR, "factors": factors.text},)


def _find_gate_scales(clues: Clues) -> tuple[Parameters, ...]:
    factors = None if clues.experts is None else clues.experts.gate_factors()
    if factors is None or not factors.differ:
        return ()
    return ({"matrix": _GATE, "factors": factors.text},)


def _find_missing(clues: Clues) -> tuple[Parameters, ...]:
    factors = _find_factors(clues)
    if factors is None or not factors.are_among(0, 1):
        return ()
    missing = factors.experts_of(0)
    # Those of a rank, or of all other ranks, have names of their own, whatever experts no token chose.
    seen = set(factors.seen.nonzero().flatten().tolist())
    if any(set(missing) in (held & seen, others & seen) for held, others in rank_slices(len(factors.seen))):
        return ()
    return ({"experts": word_experts(missing)},)


def _find_repeated(clues: Clues) -> tuple[Parameters, ...]:
    factors = _find_factors(clues)
    if factors is None:
        return ()
    times = factors.largest
    if times < 2 or not factors.are_among(1, times):
        return ()
    return ({"times": times, "experts": word_experts(factors.experts_of(times))},)


def _find_orders(clues: Clues, *, is_permutation: bool) -> tuple[Parameters, ...]:
    found = {} if clues.experts is None else clues.experts.renumbering
    if not found or (len(set(found.values())) == len(found)) is not is_permutation:
        return ()
    numbers = range(clues.base.spec.num_local_experts)
    # What no token tells stays in its place; in a permutation, where nothing else lies.
    taken = {*found.values(), *(number for number in numbers if number not in found)}
    free = iter([number for number in numbers if number not in taken])
    clashing = set(found.values()) if is_permutation else set()
    order = [
        found[number] if number in found else next(free, number) if number in clashing else number
        for number in numbers
    ]
    return ({"order": " ".join(map(str, order))},)


def _tell_factors(_: ModelSpec, parameters: Parameters) -> str:
    factors = _numbers(str(parameters["factors"]))
    off = [(expert, factor) for expert, factor in enumerate(factors) if factor != 1.0]
    told = ", ".join(f"{factor:.3g} for expert {expert}" for expert, factor in off[:_MOST_TOLD])
    more = f", and {len(off) - _MOST_TOLD} more" if len(off) > _MOST_TOLD else ""
    return f"It is a scale of {parameters['matrix']}, {min(factors):.3g} to {max(factors):.3g}: {told}{more}."


def _tell_order(_: ModelSpec, parameters: Parameters) -> str:
    order = [int(place) for place in str(parameters["order"]).split()]
    moved = [(number, place) for number, place in enumerate(order) if number != place]
    told = ", ".join(f"{number} computes with the weights of {place}" for number, place in moved[:_MOST_TOLD])
    return f"Number {told}{f', and {len(moved) - _MOST_TOLD} more' if len(moved) > _MOST_TOLD else ''}."


EXPERT_MISTAKES = (
    Mistake(
        name="gate_up_swapped",
        build=partial(_mix_with, _swapped),
        find_at_last=_find_some(_swapped),
        repair=repairs.exchange_gate_and_up,
    ),
    Mistake(name="up_plus_one_missing", build=partial(_oai_with, added=0.0), candidates=_alpha_and_limit),
    Mistake(name="swiglu_clamp_missing", build=lambda alpha: _oai_with(alpha, torch.inf), candidates=_alpha),
    Mistake(name="swiglu_alpha_missing", build=lambda limit: _oai_with(1.0, limit), candidates=_limit),
    Mistake(name="swiglu_plain", build=lambda: _mix_with(lambda gate, up, _: swiglu(gate, up))),
    Mistake(
        name="shared_missing",
        build=lambda where: _add_shared(times=0.0) if where == "sum" else _SHARED_ZERO,
        candidates=values_of("where", "sum", "shared experts"),
    ),
    Mistake(
        name="mlp_gate_up_swapped",
        build=lambda mlp: _mlp_with(mlp, lambda graph, gate, up: activate(graph, up, gate)),
        candidates=values_of("mlp", *_MLPS),
        repair=repairs.exchange_gate_and_up_of_mlp,
    ),
    Mistake(
        name="mlp_up_plus_one_missing",
        build=lambda mlp: _mlp_with(mlp, _oai_without_one),
        candidates=values_of("mlp", *_MLPS),
    ),
    Mistake(
        name="mlp_swiglu_plain",
        build=lambda mlp: _mlp_with(mlp, lambda _, gate, up: swiglu(gate, up)),
        candidates=values_of("mlp", *_MLPS),
    ),
    Mistake(
        name="dense_mlp_zero",
        build=lambda: replace_stage(Site.MLP_DELTA, lambda layer: torch.zeros_like(layer[Site.POST_NORM])),
    ),
    Mistake(name="shared_twice", build=lambda: _add_shared(times=2.0)),
    Mistake(name="shared_scaled_too", build=lambda: _add_shared(is_scaled=True)),
    Mistake(name="routed_scale_missing", build=lambda: _add_shared(scales_routed=False)),
    Mistake(
        name="up_plus_one", build=lambda: _mix_with(lambda gate, up, _: functional.silu(gate) * (up + 1.0))
    ),
    Mistake(
        name="gelu_activation",
        build=lambda approximate: _mix_with(
            lambda gate, up, _: functional.gelu(gate, approximate=approximate) * up
        ),
        candidates=values_of("approximate", "none", "tanh"),
    ),
    Mistake(name="relu_activation", build=lambda: _mix_with(lambda gate, up, _: functional.relu(gate) * up)),
    Mistake(name="activation_missing", build=lambda: _mix_with(lambda gate, up, _: gate * up)),
    Mistake(
        name="swiglu_clamped",
        build=_clamped,
        candidates=values_of("limit", *_CLAMP_LIMITS),
        fitted="limit",
        is_constant=True,
    ),
    Mistake(
        name="up_clamped",
        build=_up_clamped,
        candidates=lambda _: tuple(
            {"limit": limit, "side": side} for limit in _CLAMP_LIMITS for side in ("above", "both")
        ),
        fitted="limit",
        is_constant=True,
    ),
    Mistake(
        name="gate_up_interleaved",
        build=partial(_mix_with, _cut_as_interleaved),
        find_at_last=_find_some(_cut_as_interleaved),
        repair=repairs.interleave_gate_and_up,
    ),
    Mistake(
        name="gate_up_cut_in_halves",
        build=partial(_mix_with, _cut_as_halves),
        find_at_last=_find_some(_cut_as_halves),
        repair=repairs.part_gate_and_up,
    ),
    Mistake(
        name="experts_zero",
        build=lambda: replace_stage(
            ExpertValue.ROUTED_SUM, lambda layer: torch.zeros_like(layer[Site.POST_NORM])
        ),
    ),
    Mistake(
        name="experts_local_only",
        build=lambda ep_degree, rank: _sum_only(lambda layer: is_on_rank(layer, ep_degree, rank)),
        candidates=rank_of("ep_degree", "num_local_experts"),
    ),
    Mistake(
        name="experts_rank_missing",
        build=lambda ep_degree, rank: _sum_only(lambda layer: ~is_on_rank(layer, ep_degree, rank)),
        candidates=rank_of("ep_degree", "num_local_experts"),
    ),
    Mistake(
        name="expert_ids_shifted",
        build=lambda offset: _renumber(
            lambda layer, experts: (experts + offset) % layer.spec.num_local_experts
        ),
        candidates=each("offset", _offsets),
        repair=repairs.shift_experts,
    ),
    Mistake(
        name="experts_in_text_order",
        build=lambda: _renumber(_text_order),
        candidates=once_if(lambda inputs: inputs.spec.num_local_experts > 10),
        repair=repairs.undo_text_order,
    ),
    Mistake(
        name="experts_exchanged",
        build=lambda first, second: _renumber(_exchange(first, second)),
        # Of some ten thousand pairs only the first is listed: the port's values tell the others.
        candidates=lambda inputs: ({"first": 0, "second": 1},) if inputs.spec.num_local_experts > 1 else (),
        find=lambda clues: tuple(
            {"first": first, "second": second} for first, second in clues.wrong_tokens.exchanged_experts()
        ),
        repair=repairs.exchange_experts,
    ),
    Mistake(
        name="expert_capacity",
        build=lambda factor, counted="all": _sum_only(_within_capacity(factor, counted)),
        candidates=_capacities,
        reads_right_layer=True,
    ),
    Mistake(
        name="moe_delta_scaled",
        build=lambda factor: scaled(Site.MOE_DELTA, factor),
        candidates=values_of("factor", 2.0, 4.0, 8.0, 0.5, 0.25, 0.125, 16.0, 64.0, 1.05),
        is_factor=True,
        fitted="factor",
        repair=repairs.divide_down,
    ),
    Mistake(
        name="experts_width_partial",
        build=lambda tp_degree, rank: _mix_with(width_of_rank(tp_degree, rank)),
        candidates=rank_of("tp_degree", "intermediate_size"),
    ),
    Mistake(
        name="expert_accumulation_low_precision",
        build=lambda: replace_stage(ExpertValue.ROUTED_SUM, _sum_in_bfloat16),
        is_rounding=True,
    ),
    Mistake(
        name="experts_scaled",
        detail=_tell_factors,
        build=_scale,
        candidates=nothing_listed,
        find=_find_scales,
        find_at_last=_find_gate_scales,
    ),
    Mistake(
        name="experts_missing",
        build=lambda experts: _count(0, experts),
        candidates=nothing_listed,
        find=_find_missing,
    ),
    Mistake(name="experts_counted_twice", build=_count, candidates=nothing_listed, find=_find_repeated),
    Mistake(
        name="experts_rearranged",
        detail=_tell_order,
        build=_rearranged,
        candidates=nothing_listed,
        find_at_last=lambda clues: _find_orders(clues, is_permutation=True),
        repair=repairs.put_experts_in_place,
    ),
    Mistake(
        name="experts_of_others",
        detail=_tell_order,
        build=_rearranged,
        candidates=nothing_listed,
        find_at_last=lambda clues: _find_orders(clues, is_permutation=False),
    ),
)

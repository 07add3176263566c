"""Mistakes of the experts: what they compute, which of them do, and how their outputs are added.

`build(**parameters)` of a mistake makes the `Change` of the right layer for one of its `candidates`, or for a value of
the `fitted` parameter between them. `layer[node]` is the value of a site, or of a node within the experts, in the
changed layer. T judged tokens, k experts per token, I intermediate, n tokens of one expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from compare.diagnosis.catalogue import repairs
from compare.diagnosis.catalogue.fp8 import bfloat16
from compare.diagnosis.catalogue.splits import rank_of, share
from compare.diagnosis.clues import Clues, parse_experts, word_experts
from compare.diagnosis.evaluation import Change, Evaluation, ExpertValue, LayerInputs, replace_stage, scaled
from compare.diagnosis.expert_pass import Mix, Recipe
from compare.diagnosis.mistake import Finder, Mistake, Parameters, each, once_if, values_of
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import swiglu

# Limits that other models clamp their experts at, and smaller ones.
_CLAMP_LIMITS = (7.0, 10.0, 5.0, 3.0, 2.0, 1.0, 0.5)

# What of all columns counts as tokens in a capacity, and what takes up room: all and all, real ones and real ones, all
# and real ones, real ones and all.
_COUNTED = ("all", "real", "columns", "room")


def _mix_with(mix: Mix, experts: str = "") -> Change:
    """Combine each expert's gate and up in another way: `mix` gets gate, up [n,I] and its routing weights [n].

    `experts` are the numbers of those that do, if the others are right.
    """
    return Change(recipe=Recipe(mix=mix, experts=frozenset(parse_experts(experts)) if experts else None))


def _find_some(mix: Mix) -> Finder:
    """Find the experts that combine gate and up in another way while the others are right."""

    def find(clues: Clues) -> tuple[Parameters, ...]:
        some = () if clues.experts is None else clues.experts.experts_with(_mix_with(mix))
        return ({"experts": word_experts(some)},) if some else ()

    return find


def _gelu(approximate: str) -> Change:
    return _mix_with(lambda gate, up, _: functional.gelu(gate, approximate=approximate) * up)


def _clamped(limit: float) -> Change:
    return _mix_with(
        lambda gate, up, _: functional.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)
    )


def _up_clamped(limit: float, side: str) -> Change:
    least = -limit if side == "both" else None
    return _mix_with(lambda gate, up, _: swiglu(gate, up.clamp(min=least, max=limit)))


def _swapped(gate: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return swiglu(up, gate)


def _cut_as_interleaved(gate: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Take the even channels of [gate | up] for gate, and the odd ones for up."""
    fused = torch.cat((gate, up), dim=-1)
    return functional.silu(fused[:, 0::2]) * fused[:, 1::2]


def _cut_as_halves(gate: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Take the first half of channels in which gate and up take turns for gate, and the second half for up."""
    first, second = torch.stack((gate, up), dim=-1).flatten(-2).chunk(2, dim=-1)
    return functional.silu(first) * second


def width_of_rank(degree: int, rank: int) -> Mix:
    """Return how a rank mixes gate and up [T,F]: within its share of the width, zeros elsewhere."""

    def mix(gate: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        part = share(gate.shape[-1], degree, rank)
        mixed = torch.zeros_like(gate)
        mixed[:, part] = swiglu(gate[:, part], up[:, part])
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
    """Map each of two numbers to the other."""

    def renumber(_: Evaluation, experts: torch.Tensor) -> torch.Tensor:
        exchanged = torch.where(experts == first, second, experts)
        return torch.where(experts == second, first, exchanged)

    return renumber


def _sum_only(keeps: Callable[[Evaluation], torch.Tensor]) -> Change:
    """Leave some experts out of the sum: `keeps` returns bool [T,k], True for those that are added."""

    def stage(layer: Evaluation) -> torch.Tensor:
        shares = torch.where(keeps(layer), layer[Site.ROUTER_WEIGHTS], 0.0)
        return (layer[ExpertValue.EXPERT_OUTPUTS] * shares[..., None]).sum(1)

    return replace_stage(Site.MOE_DELTA, stage)


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


EXPERT_MISTAKES = (
    Mistake(
        name="gate_up_swapped",
        what="Gate and up are exchanged: w3 is activated, and w1 is not.",
        look_at="the order of w1 and w3 in the fused weight",
        build=partial(_mix_with, _swapped),
        find_at_last=_find_some(_swapped),
        sources=("sglang#32430", "Megatron-LM#6045"),
        repair=repairs.GATE_AND_UP_EXCHANGED,
    ),
    Mistake(
        name="up_plus_one",
        what="The up projection has one added to it, as another model's experts do.",
        look_at="the experts' activation",
        build=lambda: _mix_with(lambda gate, up, _: functional.silu(gate) * (up + 1.0)),
    ),
    Mistake(
        name="gelu_activation",
        what="The gate is activated by GELU, not SiLU.",
        look_at="the experts' activation (hidden_act)",
        build=_gelu,
        candidates=values_of("approximate", "none", "tanh"),
    ),
    Mistake(
        name="relu_activation",
        what="The gate is activated by ReLU, not SiLU.",
        look_at="the experts' activation (hidden_act)",
        build=lambda: _mix_with(lambda gate, up, _: functional.relu(gate) * up),
    ),
    Mistake(
        name="activation_missing",
        what="The gate is not activated.",
        look_at="the experts' activation (glu_type)",
        build=lambda: _mix_with(lambda gate, up, _: gate * up),
    ),
    Mistake(
        name="swiglu_clamped",
        what="Gate and up are clamped, as another model's are.",
        look_at="swiglu_limit",
        build=_clamped,
        candidates=values_of("limit", *_CLAMP_LIMITS),
        fitted="limit",
        is_constant=True,
    ),
    Mistake(
        name="up_clamped",
        what="The up projection alone is clamped, from above or on both sides; MiniMax-M2 clamps nothing.",
        look_at="a clamp of another model's experts (swiglu_limit)",
        build=_up_clamped,
        candidates=lambda _: tuple(
            {"limit": limit, "side": side} for limit in _CLAMP_LIMITS for side in ("above", "both")
        ),
        fitted="limit",
        is_constant=True,
    ),
    Mistake(
        name="gate_up_interleaved",
        what="Gate rows lie above up rows, and are cut as even and odd rows.",
        look_at="how the fused weight is laid out, and how the kernel cuts it",
        build=partial(_mix_with, _cut_as_interleaved),
        find_at_last=_find_some(_cut_as_interleaved),
        repair=repairs.GATE_AND_UP_INTERLEAVED,
    ),
    Mistake(
        name="gate_up_cut_in_halves",
        what="Gate and up rows take turns, and are cut as halves.",
        look_at="how the fused weight is laid out, and how the kernel cuts it",
        build=partial(_mix_with, _cut_as_halves),
        find_at_last=_find_some(_cut_as_halves),
        repair=repairs.GATE_AND_UP_PARTED,
    ),
    Mistake(
        name="experts_zero",
        what="The experts add nothing.",
        look_at="whether the experts' weights are bound",
        build=lambda: replace_stage(Site.MOE_DELTA, lambda layer: torch.zeros_like(layer[Site.POST_NORM])),
    ),
    Mistake(
        name="experts_local_only",
        what="Only one rank's experts contribute.",
        look_at="the all-reduce behind the experts, and global expert numbers on local lists",
        build=lambda ep_degree, rank: _sum_only(lambda layer: is_on_rank(layer, ep_degree, rank)),
        candidates=rank_of("ep_degree", "num_local_experts"),
        sources=("vllm-gaudi#1796", "flashinfer#3547", "vllm-ascend#1856"),
    ),
    Mistake(
        name="experts_rank_missing",
        what="One rank's experts contribute nothing.",
        look_at="the combination over the ranks of expert parallelism",
        build=lambda ep_degree, rank: _sum_only(lambda layer: ~is_on_rank(layer, ep_degree, rank)),
        candidates=rank_of("ep_degree", "num_local_experts"),
        sources=("vllm#52639",),
    ),
    Mistake(
        name="expert_ids_shifted",
        what="Each chosen number stands for another expert, a fixed distance away.",
        look_at="where expert numbers start: at 0, and on which rank",
        build=lambda offset: _renumber(
            lambda layer, experts: (experts + offset) % layer.spec.num_local_experts
        ),
        candidates=each("offset", _offsets),
        repair=repairs.EXPERTS_SHIFTED,
    ),
    Mistake(
        name="experts_in_text_order",
        what="The experts are stacked in the order of their numbers as text: 0, 1, 10, 11.",
        look_at="the sort of the tensors' names before they are stacked",
        build=lambda: _renumber(_text_order),
        candidates=once_if(lambda inputs: inputs.spec.num_local_experts > 10),
        repair=repairs.EXPERTS_IN_NUMBER_ORDER,
    ),
    Mistake(
        name="experts_exchanged",
        what="Two experts hold each other's weights.",
        look_at="the order in which experts are read, renamed or stacked",
        build=lambda first, second: _renumber(_exchange(first, second)),
        # Of some ten thousand pairs only the first is listed: the port's values tell the others.
        candidates=lambda inputs: ({"first": 0, "second": 1},) if inputs.spec.num_local_experts > 1 else (),
        find=lambda clues: tuple(
            {"first": first, "second": second} for first, second in clues.wrong_tokens.exchanged_experts()
        ),
        repair=repairs.TWO_EXPERTS_EXCHANGED,
    ),
    Mistake(
        name="expert_capacity",
        what="Tokens beyond an expert's capacity are dropped.",
        look_at="capacity_factor, and the number of tokens that it multiplies",
        build=lambda factor, counted="all": _sum_only(_within_capacity(factor, counted)),
        candidates=_capacities,
        reads_right_layer=True,
    ),
    Mistake(
        name="moe_delta_scaled",
        what="What the experts add is off by a factor, such as the number of ranks that add it.",
        look_at="how often the experts' output is reduced over ranks, and any factor on their input or weights",
        build=lambda factor: scaled(Site.MOE_DELTA, factor),
        candidates=values_of("factor", 2.0, 4.0, 8.0, 0.5, 0.25, 0.125, 16.0, 64.0, 1.05),
        is_factor=True,
        fitted="factor",
        repair=repairs.DOWN_DIVIDED,
    ),
    Mistake(
        name="experts_width_partial",
        what="Only one rank's slice of the experts' width contributes.",
        look_at="the all-reduce behind the down projection",
        build=lambda tp_degree, rank: _mix_with(width_of_rank(tp_degree, rank)),
        candidates=rank_of("tp_degree", "intermediate_size"),
    ),
    Mistake(
        name="expert_accumulation_low_precision",
        what="The sum over experts is rounded to BF16 after each of them.",
        look_at="the dtype in which the experts' outputs are added",
        build=lambda: replace_stage(Site.MOE_DELTA, _sum_in_bfloat16),
        is_rounding=True,
    ),
)

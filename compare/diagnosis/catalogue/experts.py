"""Mistakes of the experts: what they compute, which of them do, and how they are added.

T tokens, E experts, k of them per token, H hidden, I intermediate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import torch
from torch.nn import functional

from compare.diagnosis.catalogue.low_bits import bfloat16
from compare.diagnosis.catalogue.splits import rank_of, share
from compare.diagnosis.evaluation import Change, Evaluation, ExpertValue, LayerInputs, scaled
from compare.diagnosis.expert_pass import Mix, Recipe
from compare.diagnosis.mistake import Mistake, Parameters, each, once_if, values_of
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import swiglu


def _mixing(mix: Mix) -> Change:
    return Change(recipe=Recipe(mix=mix))


def _gelu(approximate: str) -> Change:
    return _mixing(lambda gate, up, _: functional.gelu(gate, approximate=approximate) * up)


def _clamped(limit: float) -> Change:
    return _mixing(
        lambda gate, up, _: functional.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)
    )


def _interleaved(gate: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    fused = torch.cat((gate, up), dim=-1)
    return functional.silu(fused[:, 0::2]) * fused[:, 1::2]


def _in_halves(gate: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    first, second = torch.stack((gate, up), dim=-1).flatten(-2).chunk(2, dim=-1)
    return functional.silu(first) * second


def _width_part(tp_degree: int, rank: int) -> Change:
    def mix(gate: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        part = share(gate.shape[-1], tp_degree, rank)
        mixed = torch.zeros_like(gate)
        mixed[:, part] = swiglu(gate[:, part], up[:, part])
        return mixed

    return _mixing(mix)


def _numbered(number: Callable[[Evaluation, torch.Tensor], torch.Tensor]) -> Change:
    """Use other experts' weights in place of the chosen ones'."""
    return Change(stages={ExpertValue.EXPERT_NUMBERS: lambda at: number(at, at[Site.ROUTER_EXPERTS])})


def _text_order(at: Evaluation, experts: torch.Tensor) -> torch.Tensor:
    return torch.tensor(sorted(range(at.spec.num_local_experts), key=str))[experts]


def _combined(keeps: Callable[[Evaluation], torch.Tensor]) -> Change:
    """Leave some experts out of the sum: `keeps` is bool [T,k]."""

    def stage(at: Evaluation) -> torch.Tensor:
        shares = torch.where(keeps(at), at[Site.ROUTER_WEIGHTS], 0.0)
        return (at[ExpertValue.EXPERT_OUTPUTS] * shares[..., None]).sum(1)

    return Change(stages={Site.MOE_DELTA: stage})


def _is_of(at: Evaluation, ep_degree: int, rank: int) -> torch.Tensor:
    part = share(at.spec.num_local_experts, ep_degree, rank)
    experts = at[Site.ROUTER_EXPERTS]
    return experts.ge(part.start) & experts.lt(part.stop)


def _within_capacity(factor: float, counted: str) -> Callable[[Evaluation], torch.Tensor]:
    """Decide whether a token is within its expert's capacity; all tokens count, whichever are judged."""

    def keeps(at: Evaluation) -> torch.Tensor:
        everywhere = at.base.everywhere()
        experts = everywhere[Site.ROUTER_EXPERTS]
        counts = torch.ones(len(experts), dtype=torch.bool)
        if counted == "real":
            counts = at.scene.attention_mask.flatten().bool()
        capacity = math.ceil(factor * int(counts.sum()) * experts.shape[1] / at.spec.num_local_experts)
        chosen = functional.one_hot(experts, at.spec.num_local_experts).sum(1) * counts[:, None]
        places = chosen.cumsum(0).gather(-1, experts)
        return places[at.tokens] <= capacity

    return keeps


def _accumulated(at: Evaluation) -> torch.Tensor:
    order = at[Site.ROUTER_EXPERTS].argsort(dim=-1)
    weighed = at[ExpertValue.EXPERT_OUTPUTS] * at[Site.ROUTER_WEIGHTS][..., None]
    weighed = weighed.gather(1, order[..., None].expand_as(weighed))
    return reduce(lambda total, of_expert: bfloat16(total + of_expert), weighed.unbind(1), torch.zeros(()))


def _offsets(scene: LayerInputs) -> tuple[int, ...]:
    half = scene.spec.num_local_experts // 2
    return tuple(dict.fromkeys(offset for offset in (1, -1, half, half // 2, -(half // 2)) if offset))


def _capacities(scene: LayerInputs) -> tuple[Parameters, ...]:
    counted = ("all",) if bool(scene.attention_mask.all()) else ("all", "real")
    return tuple(
        {"factor": factor} if count == "all" else {"factor": factor, "counted": count}
        for count in counted
        for factor in (1.0, 1.25, 1.5, 2.0, 0.5)
    )


EXPERT_MISTAKES = (
    Mistake(
        name="gate_up_swapped",
        what="Gate and up are exchanged: w3 is activated, and w1 is not.",
        look_at="the order of w1 and w3 in the fused weight",
        build=lambda: _mixing(lambda gate, up, _: functional.silu(up) * gate),
        sources=("sglang#32430", "Megatron-LM#6045"),
    ),
    Mistake(
        name="up_plus_one",
        what="The up projection has one added to it, as another model's experts do.",
        look_at="the experts' activation",
        build=lambda: _mixing(lambda gate, up, _: functional.silu(gate) * (up + 1.0)),
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
        build=lambda: _mixing(lambda gate, up, _: functional.relu(gate) * up),
    ),
    Mistake(
        name="activation_missing",
        what="The gate is not activated.",
        look_at="the experts' activation (glu_type)",
        build=lambda: _mixing(lambda gate, up, _: gate * up),
    ),
    Mistake(
        name="swiglu_clamped",
        what="Gate and up are clamped, as another model's are.",
        look_at="swiglu_limit",
        build=_clamped,
        candidates=values_of("limit", 7.0, 10.0, 5.0, 3.0, 2.0, 1.0, 0.5),
        fitted="limit",
    ),
    Mistake(
        name="gate_up_interleaved",
        what="Gate rows lie above up rows, and are cut as even and odd rows.",
        look_at="how the fused weight is laid out, and how the kernel cuts it",
        build=lambda: _mixing(_interleaved),
    ),
    Mistake(
        name="gate_up_cut_in_halves",
        what="Gate and up rows take turns, and are cut as halves.",
        look_at="how the fused weight is laid out, and how the kernel cuts it",
        build=lambda: _mixing(_in_halves),
    ),
    Mistake(
        name="experts_zero",
        what="The experts add nothing.",
        look_at="whether the experts' weights are bound",
        build=lambda: Change(stages={Site.MOE_DELTA: lambda at: torch.zeros_like(at[Site.POST_NORM])}),
    ),
    Mistake(
        name="experts_local_only",
        what="Only one rank's experts contribute.",
        look_at="the all-reduce behind the experts, and global expert numbers on local lists",
        build=lambda ep_degree, rank: _combined(lambda at: _is_of(at, ep_degree, rank)),
        candidates=rank_of("ep_degree", "num_local_experts"),
        sources=("vllm-gaudi#1796", "flashinfer#3547", "vllm-ascend#1856"),
    ),
    Mistake(
        name="experts_rank_missing",
        what="One rank's experts contribute nothing.",
        look_at="the combination over the ranks of expert parallelism",
        build=lambda ep_degree, rank: _combined(lambda at: ~_is_of(at, ep_degree, rank)),
        candidates=rank_of("ep_degree", "num_local_experts"),
        sources=("vllm#52639",),
    ),
    Mistake(
        name="expert_ids_shifted",
        what="Each chosen number stands for another expert, a fixed distance away.",
        look_at="where expert numbers start: at 0, and on which rank",
        build=lambda offset: _numbered(lambda at, experts: (experts + offset) % at.spec.num_local_experts),
        candidates=each("offset", _offsets),
    ),
    Mistake(
        name="experts_in_text_order",
        what="The experts are stacked in the order of their numbers as text: 0, 1, 10, 11.",
        look_at="the sort of the tensors' names before they are stacked",
        build=lambda: _numbered(_text_order),
        candidates=once_if(lambda scene: scene.spec.num_local_experts > 10),
    ),
    Mistake(
        name="expert_capacity",
        what="Tokens beyond an expert's capacity are dropped.",
        look_at="capacity_factor",
        build=lambda factor, counted="all": _combined(_within_capacity(factor, counted)),
        candidates=_capacities,
    ),
    Mistake(
        name="moe_delta_scaled",
        what="What the experts add is off by a factor, such as the number of ranks that add it.",
        look_at="how often the experts' output is reduced over ranks",
        build=lambda factor: scaled(Site.MOE_DELTA, factor),
        candidates=values_of("factor", 2.0, 4.0, 8.0, 0.5, 0.25, 0.125, 16.0, 64.0, 1.05),
        fitted="factor",
    ),
    Mistake(
        name="experts_width_partial",
        what="Only one rank's slice of the experts' width contributes.",
        look_at="the all-reduce behind the down projection",
        build=_width_part,
        candidates=rank_of("tp_degree", "intermediate_size"),
    ),
    Mistake(
        name="expert_accumulation_low_precision",
        what="The sum over experts is rounded to BF16 after each of them.",
        look_at="the dtype in which the experts' outputs are added",
        build=lambda: Change(stages={Site.MOE_DELTA: _accumulated}),
        is_rounding=True,
    ),
)

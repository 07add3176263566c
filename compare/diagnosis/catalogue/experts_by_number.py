"""Mistakes of some experts, or of each by a number of its own: the port's values give their parameters.

`clues.experts` says what each chosen number added. E experts, T judged tokens, k experts per token.
"""

from __future__ import annotations

import torch

from compare.diagnosis.catalogue import repairs
from compare.diagnosis.catalogue.splits import rank_slices
from compare.diagnosis.clues import Clues, ExpertFactors, parse_experts, scaled_gate, word_experts
from compare.diagnosis.evaluation import Change, Evaluation, ExpertValue, replace_stage
from compare.diagnosis.mistake import Mistake, Parameters, nothing_listed
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec

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
    return replace_stage(Site.MOE_DELTA, lambda layer: _sum_times(layer, numbers))


def _count(times: int, experts: str) -> Change:
    """Add some experts `times` times, 0 for never."""

    def stage(layer: Evaluation) -> torch.Tensor:
        counts = torch.ones(layer.spec.num_local_experts)
        counts[list(parse_experts(experts))] = times
        return _sum_times(layer, counts)

    return replace_stage(Site.MOE_DELTA, stage)


def _renumber(order: str) -> Change:
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
    # Those of a rank, or of all other ranks, have names of their own.
    if any(set(missing) in (held, others) for held, others in rank_slices(len(factors.seen))):
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


EXPERT_NUMBER_MISTAKES = (
    Mistake(
        name="experts_scaled",
        what="What each expert adds is off by a factor of its own.",
        look_at="the scales of w1, w2 and w3 by expert, and which of them each matrix gets",
        detail=_tell_factors,
        build=_scale,
        candidates=nothing_listed,
        find=_find_scales,
        find_at_last=_find_gate_scales,
        sources=("vllm#54974", "TensorRT-LLM#14199"),
    ),
    Mistake(
        name="experts_missing",
        what="Some experts add nothing.",
        look_at="whether their weights are loaded, and which rank computes them",
        build=lambda experts: _count(0, experts),
        candidates=nothing_listed,
        find=_find_missing,
    ),
    Mistake(
        name="experts_counted_twice",
        what="Some experts are added several times.",
        look_at="replicas of experts: which of the ranks that hold one compute it, and how they are reduced",
        build=_count,
        candidates=nothing_listed,
        find=_find_repeated,
        sources=("sglang#32962",),
    ),
    Mistake(
        name="experts_rearranged",
        what="The experts stand in another order than the router's numbers.",
        look_at="a map from logical to physical experts, and the order in which experts are stacked",
        detail=_tell_order,
        build=_renumber,
        candidates=nothing_listed,
        find_at_last=lambda clues: _find_orders(clues, is_permutation=True),
        sources=("sglang#18213",),
        repair=repairs.EXPERTS_IN_PLACE,
    ),
    Mistake(
        name="experts_of_others",
        what="Some experts compute with the weights of others.",
        look_at="the index by which an expert's weights are read",
        detail=_tell_order,
        build=_renumber,
        candidates=nothing_listed,
        find_at_last=lambda clues: _find_orders(clues, is_permutation=False),
    ),
)

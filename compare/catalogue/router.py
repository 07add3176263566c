"""Mistakes of the router: the experts' scores, their choice, and the weights of the chosen.

T tokens, E experts, k experts per token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from compare.catalogue import repairs
from compare.catalogue.candidates import Parameters, each, values_of
from compare.catalogue.low_bits import bfloat16, fp8_blocks, fp8_groups, integer_groups, offset_groups
from compare.catalogue.mistake import Mistake
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import (
    Change,
    Evaluation,
    ExpertValue,
    LayerInputs,
    replace_stage,
)
from minimax_tools.reference.expert_pass import ExpertSlots, Recipe
from minimax_tools.reference.float32_stages import (
    activate,
    choose_experts,
    correction_bias,
    router_of,
    router_scores,
)

# From the layer to one number for each token and expert, [T,E].
_Scores = Callable[[Evaluation], torch.Tensor]


def _choose_by(choice: _Scores) -> Change:
    """Choose experts by the scores `choice`."""
    return replace_stage(
        Site.ROUTER_EXPERTS, lambda layer: choose_experts(choice(layer), layer.spec.num_experts_per_tok)
    )


def _score_by(score: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Make the scores of the logits [T,E] in another way."""

    def scores(layer: Evaluation) -> torch.Tensor:
        return score(layer[Site.ROUTER_LOGITS])

    return Change(
        stages={
            Site.ROUTER_EXPERTS: lambda layer: router_of(layer).choose(scores(layer)),
            Site.ROUTER_WEIGHTS: lambda layer: _shares(layer, layer[Site.ROUTER_EXPERTS], scores(layer)),
        }
    )


def _weigh_by(weights: Callable[[Evaluation, torch.Tensor], torch.Tensor]) -> Change:
    """Weigh the chosen experts in another way: `weights` gets the layer and the experts, int64 [T,k]."""
    return replace_stage(Site.ROUTER_WEIGHTS, lambda layer: weights(layer, layer[Site.ROUTER_EXPERTS]))


def _ranked(layer: Evaluation) -> torch.Tensor:
    """Return the numbers whose largest choose the experts."""
    return router_of(layer).biased(router_scores(layer))


def _shares(layer: Evaluation, experts: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor:
    """Return the experts' weights, by the right scores or by others."""
    return router_of(layer).shares(router_scores(layer) if scores is None else scores, experts)


def _normalised(layer: Evaluation, experts: torch.Tensor) -> torch.Tensor:
    chosen = router_scores(layer).gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True)


def _weigh_scaled(weights: Callable[[Evaluation, torch.Tensor], torch.Tensor]) -> Change:
    """Weigh the chosen experts in another way, and multiply by the model's own factor behind it."""
    return _weigh_by(lambda layer, experts: layer.graph.model.share_scale * weights(layer, experts))


def _top_k(k: int) -> Change:
    return replace_stage(Site.ROUTER_EXPERTS, lambda layer: choose_experts(_ranked(layer), k))


def _logits_by(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Change:
    """Compute the logits [T,E] by `product`, from the router's input [T,H] and the gate's weight [E,H] (H hidden)."""
    return replace_stage(
        Site.ROUTER_LOGITS, lambda layer: product(layer[Site.POST_NORM], layer.weight(weight_names.GATE))
    )


# Formats in which a quantiser may hold the gate [E,H].
_GATE_FORMATS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "fp8 by block": fp8_blocks,
        "fp8 by tensor": lambda gate: fp8_blocks(gate, block=max(gate.shape)),
        "fp8 by row": lambda gate: fp8_groups(gate, gate.shape[1]),
        "int8 by row": lambda gate: integer_groups(gate, gate.shape[1], largest=127.0),
        "int8 by tensor": lambda gate: integer_groups(gate.view(1, -1), gate.numel(), largest=127.0).view_as(
            gate
        ),
        "int8 by 128": lambda gate: integer_groups(gate, 128, largest=127.0),
        "int8 by 64 with offsets": lambda gate: offset_groups(gate, 64, num_steps=255),
        "int4 by row": lambda gate: integer_groups(gate, gate.shape[1], largest=7.0),
        "int4 by 128": lambda gate: integer_groups(gate, 128, largest=7.0),
        "int4 by 64 with offsets": lambda gate: offset_groups(gate, 64, num_steps=15),
    }
)


def _grouped(groups: int, kept: int, best: int, masked: str) -> Change:
    """Choose from the `kept` best groups of experts, by the sum of their `best` scores; others score `masked`."""

    def stage(layer: Evaluation) -> torch.Tensor:
        scores = _ranked(layer).unflatten(-1, (groups, -1))
        chosen = scores.topk(best, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
        is_kept = torch.zeros(scores.shape[:-1], dtype=torch.bool).scatter(-1, chosen, True)
        rest = torch.where(is_kept[..., None], scores, float(masked)).flatten(-2)
        return choose_experts(rest, layer.spec.num_experts_per_tok)

    return replace_stage(Site.ROUTER_EXPERTS, stage)


def _groupings(inputs: LayerInputs) -> tuple[Parameters, ...]:
    """List group-limited choices of other models, in which enough experts are left to choose from."""
    num_experts, k = inputs.spec.num_local_experts, inputs.spec.num_experts_per_tok
    return tuple(
        {"groups": groups, "kept": kept, "best": best, "masked": masked}
        for groups in (8, 4, 16, 2)
        for kept in (groups // 2, groups // 4)
        for best, masked in ((2, "-inf"), (2, "0"), (1, "-inf"))
        if 0 < kept < groups and num_experts % groups == 0 and best <= num_experts // groups
        if kept * num_experts // groups >= k
    )


def _weights_on_input() -> Change:
    """Multiply each expert's input, and so its gate and up, by its routing weight, and not its output."""

    def mix(gate: torch.Tensor, up: torch.Tensor, slots: ExpertSlots) -> torch.Tensor:
        shares = slots.shares[:, None]
        return activate(slots.graph, gate * shares, up * shares)

    return Change(
        stages={ExpertValue.ROUTED_SUM: lambda layer: layer[ExpertValue.EXPERT_OUTPUTS].sum(1)},
        recipe=Recipe(mix=mix),
    )


def _other_ks(inputs: LayerInputs) -> tuple[int, ...]:
    k, num_experts = inputs.spec.num_experts_per_tok, inputs.spec.num_local_experts
    ks = (1, 2, k // 2, k - 1, k + 1, 2 * k, k - 2, k + 2)
    return tuple(dict.fromkeys(other for other in ks if 0 < other <= num_experts and other != k))


ROUTER_MISTAKES = (
    Mistake(name="router_softmax", build=lambda: _score_by(lambda logits: logits.softmax(-1))),
    Mistake(name="router_sigmoid", build=lambda: _score_by(torch.sigmoid)),
    Mistake(name="router_bias_missing", build=lambda: _choose_by(router_scores)),
    Mistake(
        name="router_bias_low_precision",
        build=lambda: _choose_by(lambda layer: router_scores(layer) + bfloat16(correction_bias(layer))),
    ),
    Mistake(
        name="router_choice_low_precision",
        build=lambda: _choose_by(lambda layer: bfloat16(_ranked(layer))),
    ),
    Mistake(
        name="router_bias_negated",
        build=lambda: _choose_by(lambda layer: router_scores(layer) - correction_bias(layer)),
        repair=repairs.negate_correction_bias,
    ),
    Mistake(
        name="router_bias_in_weights",
        build=lambda: _weigh_by(lambda layer, experts: _shares(layer, experts, _ranked(layer))),
    ),
    Mistake(
        name="router_weights_not_normalised",
        build=lambda: _weigh_scaled(lambda layer, experts: router_scores(layer).gather(-1, experts)),
    ),
    Mistake(name="router_weights_normalised", build=lambda: _weigh_scaled(_normalised)),
    Mistake(
        name="router_weights_scaled",
        build=lambda factor: _weigh_by(lambda layer, experts: factor * _shares(layer, experts)),
        candidates=values_of("factor", 2.0, 0.5, 2.5, 4.0, 8.0, 0.25, 0.125, 1.5),
        is_factor=True,
        fitted="factor",
    ),
    Mistake(
        name="router_top_k",
        build=_top_k,
        candidates=each("k", _other_ks),
        fitted="k",
        is_whole=True,
        is_constant=True,
    ),
    Mistake(name="router_groups", build=_grouped, candidates=_groupings),
    Mistake(
        name="router_low_precision",
        build=lambda: _logits_by(lambda states, gate: (states.bfloat16() @ gate.bfloat16().T).float()),
    ),
    Mistake(
        name="router_gate_low_precision",
        build=lambda: _logits_by(lambda states, gate: states @ bfloat16(gate).T),
    ),
    Mistake(
        name="router_quantised",
        build=lambda stored: _logits_by(lambda states, gate: states @ _GATE_FORMATS[stored](gate).T),
        candidates=values_of("stored", *_GATE_FORMATS),
    ),
    Mistake(name="router_weights_on_input", build=_weights_on_input),
    Mistake(
        name="router_softmax_of_chosen",
        build=lambda: _weigh_scaled(
            lambda layer, experts: layer[Site.ROUTER_LOGITS].gather(-1, experts).softmax(-1)
        ),
    ),
    Mistake(
        name="router_weights_uniform",
        build=lambda: _weigh_scaled(
            lambda layer, experts: torch.full(experts.shape, 1.0 / experts.shape[-1])
        ),
    ),
    Mistake(
        name="router_sigmoid_missing",
        build=lambda: _choose_by(lambda layer: layer[Site.ROUTER_LOGITS] + correction_bias(layer)),
    ),
)

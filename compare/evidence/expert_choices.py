"""Experts that both sides chose: tokens by expert, and the margins of flips.

T judged tokens, k experts of each. A flip is a token for which the port chose other experts than the golden.
"""

from __future__ import annotations

import torch

from compare.comparer import JudgedRun
from compare.judging.layer_judge import LayerJudge
from compare.judging.routing import flipped_tokens
from minimax_tools.model.sites import Site
from reports.page.evidence import FlipPoint, LayerRouting

# Flips that are told of each layer.
_MOST_FLIPS = 64


def collect_routing(run: JudgedRun) -> tuple[LayerRouting, ...]:
    """Collect the experts of every layer in which both sides show them.

    Raises:
        CheckpointError: The weights, which tell the scores of a flip, cannot be read.
    """
    shown = (
        layer
        for layer in sorted(run.inputs)
        if all(Site.ROUTER_EXPERTS in side.sites(layer) for side in (run.sides.reference, run.sides.target))
    )
    found = (_collect_layer(run, layer) for layer in shown)
    return tuple(routing for routing in found if routing is not None)


def _collect_layer(run: JudgedRun, layer: int) -> LayerRouting | None:
    """Collect the experts of one layer; None if the sides' shapes differ."""
    judge = LayerJudge(run.sides, layer=layer, layer_input=run.inputs[layer])
    if judge.experts is None:
        return None
    golden, port = judge.experts
    num_experts = 1 + max(int(golden.max()), int(port.max()))
    logits = Site.ROUTER_LOGITS
    if logits in run.sides.reference.sites(layer):
        num_experts = max(num_experts, run.sides.reference.read(layer, logits).shape[-1])
    noise = judge.choice_noise
    flipped = flipped_tokens(golden, port)
    flips: list[FlipPoint] = []
    if noise is not None:
        margin = noise.flip_margin(golden, port)
        is_explained = noise.is_within_reach(margin)
        places = judge.choice_places()
        indices = flipped.nonzero().flatten()
        for token in indices[margin[indices].argsort(descending=True, stable=True)][:_MOST_FLIPS].tolist():
            row, position = places[token].tolist()
            flips.append(
                FlipPoint(
                    row=row,
                    position=position,
                    margin=float(margin[token]),
                    is_explained=bool(is_explained[token]),
                )
            )
    return LayerRouting(
        layer=layer,
        golden_load=_load(golden, num_experts),
        port_load=_load(port, num_experts),
        is_inherited=run.inputs[layer].is_inherited,
        reach=None if noise is None else float(noise.reach.median()),
        flips=tuple(flips),
    )


def _load(experts: torch.Tensor, num_experts: int) -> tuple[int, ...]:
    """Count the tokens of each expert, from [T,k]; numbers that are no expert's are left out."""
    numbers = experts.long().flatten()
    return tuple(torch.bincount(numbers[numbers >= 0], minlength=num_experts).tolist())

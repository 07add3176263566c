"""Own input: what a port's stage gave, held against a mistake and against the right stage, on the port's own inputs."""

from __future__ import annotations

import torch

from compare.diagnosis.layer_case import LayerCase
from compare.diagnosis.mistake import Hypothesis
from compare.diagnosis.proof.stage_cut import sites_behind
from compare.diagnosis.score import Score
from compare.diagnosis.trial import Trial
from compare.sides.golden_weights import GoldenWeights
from compare.sides.pairing import find_mismatch
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import Site

# Chosen experts are numbers without a distance, and they and their weights may stand in any order: what the experts add
# up to judges them.
_CHOICES = (Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)


def comparable_sites(reference: CaptureSource, target: CaptureSource, layer: int) -> frozenset[Site]:
    """Return the sites of a layer that both sides hold, in one shape."""
    return frozenset(
        site
        for site in reference.sites(layer)
        if site in target.sites(layer)
        and find_mismatch(reference.read(layer, site), target.read(layer, site)) is None
    )


def score_on_own_input(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    weights: GoldenWeights,
    layer: int,
    hypothesis: Hypothesis,
    cut: tuple[Site, ...],
) -> Score:
    """Score a hypothesis by what the port gave at the `cut` sites, computed from what it shows before the mistake.

    The golden (`reference`) and the run hold the layer's input and output.
    """
    comparable = comparable_sites(reference, target, layer)
    behind_choice = Site.MOE_DELTA if Site.MOE_DELTA in comparable else Site.OUTPUT
    judging = dict.fromkeys(behind_choice if site in _CHOICES else site for site in cut)
    own = comparable - hypothesis.sites - sites_behind(hypothesis.sites)
    with torch.no_grad():
        trial = _open_trial(reference, target, weights, layer, judging=tuple(judging), own=own)
        return trial.judge([hypothesis])[0]


def rho_on_own_input(
    reference: CaptureSource, target: CaptureSource, *, weights: GoldenWeights, layer: int, site: Site
) -> float:
    """Return ρ of a site against the right layer, computed from what the port shows before it."""
    own = comparable_sites(reference, target, layer) - {site} - sites_behind([site])
    with torch.no_grad():
        trial = _open_trial(reference, target, weights, layer, judging=(site,), own=own)
        return trial.null().unexplained


def _open_trial(
    reference: CaptureSource,
    target: CaptureSource,
    weights: GoldenWeights,
    layer: int,
    *,
    judging: tuple[Site, ...],
    own: frozenset[Site],
) -> Trial:
    case = LayerCase(
        reference,
        target,
        weights=weights,
        layer=layer,
        suspects=frozenset(),
        judging=judging,
        own=own | {Site.INPUT},
    )
    return case.open_trial()

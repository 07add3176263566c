"""Own input: what a port's stage gave, held against a mistake and against the right stage, on the port's own inputs.

T real tokens, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compare.diagnosis.layer_case import LayerCase
from compare.diagnosis.mistake import Hypothesis
from compare.diagnosis.naming import FAINT_RHO, is_explanation
from compare.diagnosis.proof.stage_cut import sites_behind
from compare.diagnosis.score import Score
from compare.diagnosis.trial import Trial
from compare.sides.batch import Batch
from compare.sides.golden_weights import GoldenWeights
from compare.sides.pairing import find_mismatch
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import Site

# Chosen experts are numbers without a distance, and they and their weights may stand in any order: what the experts add
# up to judges them, and the weights of equal choices.
_CHOICES = (Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)
# Relative error of routing weights that may still be those of the mistake: a port that holds them in BF16 is off by
# 2**-9 at most, twice.
_MOST_OFF = 2**-8
# Share of the tokens whose experts are those of the mistake, at least: near ties may fall either way.
_LEAST_ALIKE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnInputFit:
    """Fit of a mistake to what a stage gave."""

    score: Score
    # Relative error of the routing weights against the mistake's, of tokens with equal experts; infinity if too few
    # are equal, and 0 if the mistake is not in the choice, or the port does not show logits, experts and weights.
    weights_error: float

    @property
    def is_explained(self) -> bool:
        """True if the stage gave what the mistake gives."""
        return is_explanation(self.score) and self.weights_error <= _MOST_OFF


def comparable_sites(reference: CaptureSource, target: CaptureSource, layer: int) -> frozenset[Site]:
    """Return the sites of a layer that both sides hold, in one shape."""
    return frozenset(
        site
        for site in reference.sites(layer)
        if site in target.sites(layer)
        and find_mismatch(reference.read(layer, site), target.read(layer, site)) is None
    )


def fit_on_own_input(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    weights: GoldenWeights,
    layer: int,
    hypothesis: Hypothesis,
    cut: tuple[Site, ...],
) -> OwnInputFit:
    """Fit a hypothesis to what the port gave at the `cut` sites, computed from what it shows before the mistake.

    The golden (`reference`) and the run hold the layer's input and output. A mistake that the noise covers is fitted on
    the golden's values too, if the port's input is the golden's: they share its roundings.
    """
    comparable = comparable_sites(reference, target, layer)
    behind_choice = Site.MOE_DELTA if Site.MOE_DELTA in comparable else Site.OUTPUT
    judging = dict.fromkeys(behind_choice if site in _CHOICES else site for site in cut)
    own = comparable - hypothesis.sites - sites_behind(hypothesis.sites)
    with torch.no_grad():
        trial = _open_trial(reference, target, weights, layer, judging=tuple(judging), own=own | {Site.INPUT})
        error = 0.0
        if hypothesis.sites.intersection(_CHOICES, cut) and {Site.ROUTER_LOGITS, *_CHOICES} <= comparable:
            experts, shares = (_read_rows(reference, target, layer, site) for site in _CHOICES)
            error = _weights_error(trial, hypothesis, experts, shares)
        fit = OwnInputFit(score=trial.judge([hypothesis])[0], weights_error=error)
        if fit.is_explained or fit.score.unexplained > FAINT_RHO or not _is_isolated(target):
            return fit
        trial = _open_trial(reference, target, weights, layer, judging=tuple(judging), own=frozenset())
        faint = next((score for score in trial.judge_faint([hypothesis]) if is_explanation(score)), fit.score)
        return OwnInputFit(score=faint, weights_error=error)


def rho_on_own_input(
    reference: CaptureSource, target: CaptureSource, *, weights: GoldenWeights, layer: int, site: Site
) -> float:
    """Return ρ of a site against the right layer, computed from what the port shows before it."""
    own = comparable_sites(reference, target, layer) - {site} - sites_behind([site])
    with torch.no_grad():
        trial = _open_trial(reference, target, weights, layer, judging=(site,), own=own | {Site.INPUT})
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
        own=own,
    )
    return case.open_trial()


def _is_isolated(target: CaptureSource) -> bool:
    description = target.known_description
    return description is not None and description.run.mode is Mode.ISOLATED


def _read_rows(reference: CaptureSource, target: CaptureSource, layer: int, site: Site) -> torch.Tensor:
    return Batch(reference.read_inputs().is_kept).rows(target.read(layer, site), site)


def _weights_error(
    trial: Trial, hypothesis: Hypothesis, experts: torch.Tensor, shares: torch.Tensor
) -> float:
    """Return the relative error of the port's routing weights [T,k], of the tokens with the hypothesis's experts."""
    mistaken = trial.base.changed(hypothesis.change)
    expected_experts, order = mistaken[Site.ROUTER_EXPERTS].sort(-1)
    found_experts, found_order = experts.long().sort(-1)
    expected = mistaken[Site.ROUTER_WEIGHTS].gather(-1, order)
    found = shares.float().gather(-1, found_order)
    if expected.shape != found.shape:
        return float("inf")
    is_alike = (expected_experts == found_experts).all(-1)
    if float(is_alike.float().mean()) < _LEAST_ALIKE:
        return float("inf")
    return float((found - expected)[is_alike].norm() / expected[is_alike].norm())

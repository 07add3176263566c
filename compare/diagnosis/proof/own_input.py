"""Own input: what a port's stage gave, held against a mistake and against the right stage, on the port's own inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compare.diagnosis.layer_case import LayerCase, comparable_sites
from compare.diagnosis.mistake import Hypothesis
from compare.diagnosis.naming import FAINT_RHO, is_explanation
from compare.diagnosis.proof.stage_cut import sites_behind
from compare.diagnosis.score import Score
from compare.diagnosis.trial import Trial
from compare.sides.golden_weights import GoldenWeights
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import Site


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnInputFit:
    """Fit of a mistake to what a stage gave."""

    score: Score
    is_explained: bool  # whether the stage gave what the mistake gives
    is_factor: bool = False  # whether a factor on the stage's right values explains what it gave as well

    def word_refusal(self, side: str, sites: str) -> str:
        """Say why the mistake is not proved; `side` gave the values at the sites."""
        if self.is_factor:
            return (
                f"what {side} gives at {sites} is the right value times a factor as much as it is the mistake"
            )
        return f"what {side} gives at {sites} is not what the mistake gives on its own inputs"


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
    judging = cut
    if Site.ROUTER_WEIGHTS in cut and Site.ROUTER_EXPERTS not in comparable:
        # Weights in any order say nothing: what the experts add up to does.
        shown = Site.MOE_DELTA if Site.MOE_DELTA in comparable else Site.OUTPUT
        judging = tuple(dict.fromkeys(shown if site is Site.ROUTER_WEIGHTS else site for site in cut))
    own = comparable - hypothesis.sites - sites_behind(hypothesis.sites)
    with torch.no_grad():
        trial = _open_trial(reference, target, weights, layer, judging=judging, own=own | {Site.INPUT})
        fit = _fit(trial, hypothesis, trial.judge([hypothesis])[:1])
        if fit.is_explained or fit.score.unexplained > FAINT_RHO or not _is_isolated(target):
            return fit
        trial = _open_trial(reference, target, weights, layer, judging=judging, own=frozenset())
        faint = _fit(trial, hypothesis, trial.judge_faint([hypothesis]))
        return faint if faint.is_explained else fit


def _fit(trial: Trial, hypothesis: Hypothesis, scores: Sequence[Score]) -> OwnInputFit:
    """Return the fit of the first score that explains the stage better than a factor does, or else of the first."""
    score = next(filter(is_explanation, scores), scores[0])
    is_factor = (
        is_explanation(score)
        and not hypothesis.is_factor
        and not score.is_better_than(trial.factor_misfits())
    )
    return OwnInputFit(score=score, is_explained=is_explanation(score) and not is_factor, is_factor=is_factor)


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

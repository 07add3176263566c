"""Recomputed proofs: of a dump there is no port to run, but what it shows may prove a mistake.

What it gives at the mistake's stage must be what the mistake gives on its own inputs; all else must be right.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from compare.catalogue.mistake import Hypothesis
from compare.catalogue.undo import Undo, join_hypotheses
from compare.diagnosis.layer_case import LayerCase, comparable_sites
from compare.diagnosis.naming import FAINT_RHO, is_explanation, most_left
from compare.diagnosis.proof.proof import (
    MistakeProof,
    ProofOutcome,
    ProofWay,
    SiteProof,
    StageProof,
    not_provable,
)
from compare.diagnosis.score import Score
from compare.diagnosis.trial import Trial
from compare.sides.golden_weights import GoldenWeights, WeightSource
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import SITE_INPUTS, Site
from minimax_tools.reference.right_stages import cut_behind, sites_behind
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus


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


_RUN_PORT = "Run the port on this golden with mm2-test, and prove it there."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputedProofs:
    """Proofs from the sites of a dump."""

    golden: CaptureSource
    dump: CaptureSource
    comparison: Comparison  # the judgement of the dump
    weights: WeightSource

    def prove(self, layer: int, undone: tuple[Undo, ...]) -> MistakeProof:
        """Prove mistakes in a layer from what the dump shows of it."""
        hypothesis = join_hypotheses(undone)
        shown = comparable_sites(self.golden, self.dump, layer)
        cut = cut_behind(hypothesis.sites, replaceable=shown - {Site.OUTPUT})
        missing = _missing(hypothesis.sites, cut, shown)
        if missing:
            return not_provable(
                "there is no port to run, and the dump does not show "
                f"{', '.join(map(str, missing))} of layer {layer}",
                _RUN_PORT,
            )
        with self.weights.open_layer(layer, self.golden) as weights:
            fit = fit_on_own_input(
                self.golden, self.dump, weights=weights, layer=layer, hypothesis=hypothesis, cut=cut
            )
            stage = StageProof(leaves=_finite(fit.score.leaves), unexplained=_finite(fit.score.unexplained))
            if not fit.is_explained:
                return MistakeProof(
                    outcome=ProofOutcome.NOT_PROVED,
                    reason=fit.word_refusal("the dump", _word(cut)),
                    before=self.comparison.verdict,
                    stage=stage,
                )
            mistaken = {*hypothesis.sites, *cut}
            sites = tuple(
                self._judge_site(result, layer, weights, fit.score)
                for result in self.comparison.of_layer(layer)
                if Site(result.site) not in mistaken and result.status.is_compared
            )
        wrong = [site.site for site in sites if not site.is_right]
        return MistakeProof(
            outcome=ProofOutcome.NOT_PROVED if wrong else ProofOutcome.PROVED,
            reason=f"{_word(wrong)} is wrong too" if wrong else "",
            way=ProofWay.RECOMPUTED,
            before=self.comparison.verdict,
            sites=sites,
            stage=stage,
        )

    def _judge_site(self, result: SiteResult, layer: int, weights: GoldenWeights, stage: Score) -> SiteProof:
        """Judge another site by what the dump shows before it; chosen experts by the comparison alone."""
        site = Site(result.site)
        is_blamed = any(
            blame.layer == layer and result.site in blame.sites for blame in self.comparison.blame
        )
        before = result.noise.whole if result.noise else None
        if result.status is not SiteStatus.FAIL or is_blamed or result.noise is None:
            return SiteProof(site=result.site, before=before, after=before, is_right=not is_blamed)
        after = rho_on_own_input(self.golden, self.dump, weights=weights, layer=layer, site=site)
        return SiteProof(
            site=result.site,
            before=before,
            after=_finite(after),
            is_right=after <= most_left(stage.unexplained),
        )


def _missing(sites: Collection[Site], cut: tuple[Site, ...], shown: Collection[Site]) -> tuple[Site, ...]:
    """Return the sites that a proof needs and the dump lacks: the layer's input, the stages, and one that follows."""
    if Site.OUTPUT in cut:
        needed = {*sites, *SITE_INPUTS[Site.OUTPUT]}
    else:
        needed = {Site.INPUT} if sites_behind(cut) & set(shown) else {Site.INPUT, Site.OUTPUT}
    return tuple(sorted(needed - set(shown), key=lambda site: site.order))


def _word(sites: Collection[str]) -> str:
    return ", ".join(map(str, sites))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

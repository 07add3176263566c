"""Recomputed proofs: of a dump there is no port to run, but what it shows may prove a mistake.

What the dump gives at the mistake's stage must be what the mistake gives on the dump's own inputs of it. And all else
that the dump shows of the layer must be right, computed from the dump's own values.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from compare.diagnosis.layer_case import comparable_sites
from compare.diagnosis.naming import most_left
from compare.diagnosis.proof.own_input import fit_on_own_input, rho_on_own_input
from compare.diagnosis.proof.proof import (
    MistakeProof,
    ProofOutcome,
    ProofWay,
    SiteProof,
    StageProof,
    not_provable,
)
from compare.diagnosis.proof.stage_cut import cut_behind, sites_behind
from compare.diagnosis.proof.undo import Undo, join_hypotheses
from compare.diagnosis.score import Score
from compare.sides.golden_weights import GoldenWeights, WeightSource
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import SITE_INPUTS, Site
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus

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

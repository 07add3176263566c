"""Recomputed proofs: of a dump there is no port to run, but what it shows may prove a mistake.

What the dump gives at the mistake's stage must be what the mistake gives on the dump's own inputs of it. And what it
gives behind must be right, computed from the dump's own values: the comparison has judged that.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from compare.diagnosis.mistake import Hypothesis
from compare.diagnosis.naming import is_explanation
from compare.diagnosis.proof.own_input import comparable_sites, score_on_own_input
from compare.diagnosis.proof.proof import (
    Proof,
    ProofOutcome,
    ProofWay,
    SiteProof,
    StageProof,
    not_provable,
)
from compare.diagnosis.proof.stage_cut import cut_behind, sites_behind
from compare.diagnosis.proof.undo import Undo, join_hypotheses
from compare.sides.golden_weights import WeightSource
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import SITE_INPUTS, Site
from minimax_tools.results.results import Comparison

_RUN_PORT = "Run the port on this golden with mm2-test, and prove it there."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputedProofs:
    """Proofs from the sites of a dump."""

    golden: CaptureSource
    dump: CaptureSource
    comparison: Comparison  # the judgement of the dump, with the checkpoint
    weights: WeightSource

    def prove(self, layer: int, undone: tuple[Undo, ...]) -> Proof:
        """Prove mistakes in a layer from what the dump shows of it."""
        hypothesis = join_hypotheses(undone)
        shown = comparable_sites(self.golden, self.dump, layer)
        missing = _missing(hypothesis, shown)
        if missing:
            return not_provable(
                "there is no port to run, and the dump does not show "
                f"{', '.join(map(str, missing))} of layer {layer}",
                _RUN_PORT,
            )
        cut = cut_behind(hypothesis.sites, replaceable=shown - {Site.OUTPUT})
        with self.weights.open_layer(layer, self.golden) as weights:
            score = score_on_own_input(
                self.golden, self.dump, weights=weights, layer=layer, hypothesis=hypothesis, cut=cut
            )
        blamed = {
            Site(site) for blame in self.comparison.blame if blame.layer == layer for site in blame.sites
        }
        others = sorted(blamed - hypothesis.sites - set(cut), key=lambda site: site.order)
        is_explained = is_explanation(score)
        return Proof(
            outcome=ProofOutcome.PROVED if is_explained and not others else ProofOutcome.NOT_PROVED,
            reason=_word_reason(cut, others) if others or not is_explained else "",
            way=ProofWay.RECOMPUTED if is_explained else None,
            before=self.comparison.verdict,
            sites=self._site_proofs(layer, cut, blamed - hypothesis.sites - set(cut)),
            stage=StageProof(leaves=_finite(score.leaves), unexplained=_finite(score.unexplained)),
        )

    def _site_proofs(
        self, layer: int, cut: tuple[Site, ...], others: Collection[Site]
    ) -> tuple[SiteProof, ...]:
        """Return the sites behind the stage that were compared; they are right unless they are to blame themselves."""
        behind = sites_behind(cut) - set(cut)
        return tuple(
            SiteProof(site=result.site, before=None, after=None, is_right=Site(result.site) not in others)
            for result in self.comparison.of_layer(layer)
            if Site(result.site) in behind and result.status.is_compared
        )


def _missing(hypothesis: Hypothesis, shown: Collection[Site]) -> tuple[Site, ...]:
    """Return the sites that a proof needs and the dump lacks: the stages, their inputs, and one that follows."""
    needed = {*hypothesis.sites, *(source for site in hypothesis.sites for source in SITE_INPUTS[site])}
    follows = sites_behind(hypothesis.sites)
    if follows and not follows & set(shown):
        needed |= {min(follows, key=lambda site: site.order)}
    return tuple(sorted(needed - set(shown), key=lambda site: site.order))


def _word_reason(cut: tuple[Site, ...], others: Collection[Site]) -> str:
    if others:
        return f"{', '.join(map(str, others))} is wrong too"
    return f"what the dump gives at {', '.join(map(str, cut))} is not what the mistake gives on the dump's own inputs"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

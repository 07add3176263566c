"""Trial: some tokens of a layer, computed under each hypothesis and scored by what the port gave. T tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from compare.catalogue.clues import Clues
from compare.catalogue.mistake import Hypothesis
from compare.diagnosis.score import Score, SitePrediction, score_predictions
from compare.noise.rows import TINY_FLOAT32
from compare.noise.yardstick import MOST_LEFT, Yardstick, trimmed_mean
from minimax_tools.model.sites import BEHIND_EXPERTS, Site
from minimax_tools.reference.evaluation import (
    CHOICES,
    STAGES,
    Change,
    Evaluation,
    ExpertValue,
    GraphNode,
)
from minimax_tools.reference.expert_pass import run_experts
from minimax_tools.reference.float32_stages import has_all_tokens

# Experts' outputs held at a time, float32: a layer of true size was diagnosed within 8 GB (BENCHMARKS.md).
_MOST_BYTES = 1_500_000_000
# Draws of noise, and its size over the golden's: twice, since the port has noise of its own, which may be larger. A
# token whose experts stay the same in 6 draws changes them with a chance of less than about a third.
_NUM_DRAWS = 6
_NOISE_FACTOR = 2.0
# Factor on the mean square of a right site's error, at least that of noise, beyond which a hypothesis makes it wrong.
_MOST_WORSE = 2.0
_ROUTER_CHOICE = frozenset({Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS})
# Sites whose values depend on the chosen experts.
_OF_CHOICE = frozenset((*CHOICES, *BEHIND_EXPERTS))


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """A layer's noise and both sides' values, by which hypotheses are judged.

    In `on_golden_values` each stage of the layer is computed from the golden's own BF16 values, where the golden holds
    them, and not from the float32 values of the stage before; None if the layer inherits errors.
    """

    base: Evaluation  # the layer without a mistake, on these tokens
    on_golden_values: Evaluation | None
    yardsticks: Mapping[Site, Yardstick]  # the port's values and their noise at the sites that judge
    logit_noise: float  # standard deviation of the error that BF16 causes in the router's logits
    is_decoded: torch.Tensor  # whether a token was decoded, bool [T]
    is_usable: torch.Tensor  # whether the port gave finite values for a token, bool [T]
    # Shown sites that do not judge: a hypothesis that begins there too must leave them right.
    controls: Mapping[Site, Yardstick] = field(default_factory=dict)

    def select_tokens(self, indices: torch.Tensor) -> Trial:
        """Return the trial of some of the tokens, by their indices among the T."""
        on_golden_values = self.on_golden_values
        return replace(
            self,
            base=self.base.select_tokens(indices),
            on_golden_values=None if on_golden_values is None else on_golden_values.select_tokens(indices),
            yardsticks=_select(self.yardsticks, indices),
            controls=_select(self.controls, indices),
            is_decoded=self.is_decoded[indices],
            is_usable=self.is_usable[indices],
        )

    def judge(self, hypotheses: Sequence[Hypothesis], *, keeps_predicted: bool = False) -> list[Score]:
        """Score hypotheses; if tokens were decoded, each is also scored as a mistake of these tokens alone."""
        scores = []
        settled = self.settled
        for hypothesis, evaluation in self.evaluate(hypotheses):
            predictions = {
                site: SitePrediction(rows=evaluation.rows(site), growth=self._growth(evaluation, site))
                for site in self.yardsticks
            }
            judged = settled & self._settled(evaluation)
            scores += self._score_all_and_decoded(
                hypothesis, predictions, judged, judged_if_right=settled, keeps_predicted=keeps_predicted
            )
        return scores

    def judge_faint(self, hypotheses: Sequence[Hypothesis]) -> list[Score]:
        """Score mistakes that may be fainter than the noise; none if the layer inherits errors.

        The changed nodes are computed with the mistake, and without it (`right_rows`), both from the golden's own BF16
        values, since a rounding depends on the bits that it rounds. Their difference is added to the float32 layer. A
        router's mistake is judged by all tokens: it shows where experts are nearly tied.
        """
        if self.on_golden_values is None:
            return []
        # Mistakes that change the same nodes share one right layer.
        recomputed = {
            hypothesis.change.nodes: _recompute(hypothesis.change.nodes) for hypothesis in hypotheses
        }
        right_rows: dict[frozenset[GraphNode], dict[Site, torch.Tensor]] = {}
        for hypothesis, evaluation in self.evaluate(list(recomputed.values()), base=self.on_golden_values):
            right_rows[hypothesis.change.nodes] = {site: evaluation.rows(site) for site in self.yardsticks}
        scores = []
        for hypothesis, evaluation in self.evaluate(hypotheses, base=self.on_golden_values):
            without_mistake = right_rows[hypothesis.change.nodes]
            predictions = {
                site: SitePrediction(rows=yardstick.exact + evaluation.rows(site) - without_mistake[site])
                for site, yardstick in self.yardsticks.items()
            }
            judged = self.is_usable if hypothesis.sites & _ROUTER_CHOICE else self.settled
            scores += self._score_all_and_decoded(hypothesis, predictions, judged, judged_if_right=judged)
        return scores

    def refutes(self, hypothesis: Hypothesis) -> bool:
        """Decide whether a shown site at which a hypothesis begins, beside other sites, refutes it."""
        begins = hypothesis.sites
        if len(begins) < 2 or not bool(self.is_usable.any()):
            return False
        evaluation, shown = self.base.changed(hypothesis.change), {**self.controls, **self.yardsticks}
        return any(
            trimmed_mean(shown[site].misfit(evaluation.rows(site), shown[site].variance)[self.is_usable])
            > limit
            for site, limit in self._most_misfit.items()
            if site in begins
        )

    @cached_property
    def _most_misfit(self) -> Mapping[Site, float]:
        """The mean square error of each shown site beyond which it refutes a hypothesis that begins there."""
        limits = {site: MOST_LEFT**2 for site in self.yardsticks if has_all_tokens(site)}
        for site, shown in self.controls.items():
            # A site that is right must not be wrong under the hypothesis.
            right = trimmed_mean(shown.misfit(shown.exact, shown.variance)[self.is_usable])
            limits[site] = _MOST_WORSE * max(right, 1.0)
        return limits

    def null(self) -> Score:
        """Score the null hypothesis: the layer without a mistake."""
        return score_predictions(
            Hypothesis(mistakes=(), parameters=(), change=Change()),
            {site: SitePrediction(rows=yardstick.exact) for site, yardstick in self.yardsticks.items()},
            yardsticks=self.yardsticks,
            judged=self.settled,
            is_decode_only=False,
        )

    @cached_property
    def clues(self) -> Clues:
        """Reading of the port's values by themselves."""
        return Clues(base=self.base, yardsticks=self.yardsticks, settled=self.settled)

    def factor_misfits(self) -> torch.Tensor:
        """Return the mean ρ² by token if every judging site were off by the factor that fits it best, float64 [T]."""
        misfits = []
        for yardstick in self.yardsticks.values():
            weights = torch.where(self.settled[:, None], 1.0 / yardstick.variance, 0.0)
            exact, port = yardstick.exact, yardstick.port.nan_to_num(0.0)
            factor = float(
                (weights * exact * port).sum() / (weights * exact.square()).sum().clamp(min=TINY_FLOAT32)
            )
            misfits.append(yardstick.misfit(factor * exact, yardstick.variance))
        return torch.where(self.settled, torch.stack(misfits).mean(0), torch.nan)

    @cached_property
    def error(self) -> torch.Tensor:
        """The port's error on the settled tokens, in units of noise, all judging sites in one: [n]."""
        parts = [
            torch.where(
                self.settled[:, None],
                (yardstick.port - yardstick.golden) / yardstick.variance.sqrt(),
                0.0,
            )
            for yardstick in self.yardsticks.values()
        ]
        return torch.cat([part.flatten() for part in parts])

    def evaluate(
        self, hypotheses: Sequence[Hypothesis], *, base: Evaluation | None = None
    ) -> Iterator[tuple[Hypothesis, Evaluation]]:
        """Evaluate the layer, or another base, under each hypothesis; the experts of many run together."""
        k, hidden = self.base.spec.num_experts_per_tok, self.base.spec.hidden_size
        num_at_once = max(_MOST_BYTES // (4 * len(self.base.tokens) * k * hidden), 1)
        for start in range(0, len(hypotheses), num_at_once):
            batch = hypotheses[start : start + num_at_once]
            evaluations = [(base or self.base).changed(hypothesis.change) for hypothesis in batch]
            self._run_experts(evaluations)
            yield from zip(batch, evaluations, strict=True)

    @cached_property
    def settled(self) -> torch.Tensor:
        """Tokens of the right layer whose experts no noise changes, bool [T]."""
        return settled_tokens(self.base, self.logit_noise) & self.is_usable

    def _settled(self, evaluation: Evaluation) -> torch.Tensor:
        # What lies before the router says the same of all tokens.
        if not evaluation.is_affected(Site.ROUTER_EXPERTS) or _OF_CHOICE.isdisjoint(self.yardsticks):
            return self.settled
        return settled_tokens(evaluation, self.logit_noise) & self.is_usable

    def _run_experts(self, evaluations: Sequence[Evaluation]) -> None:
        """Compute the experts' outputs of all evaluations whose change affects them, if a judging site needs them."""
        affected = [changed for changed in evaluations if changed.is_affected(ExpertValue.EXPERT_OUTPUTS)]
        if not affected or not any(site in self.yardsticks for site in BEHIND_EXPERTS):
            return
        jobs = [evaluation.expert_job() for evaluation in affected]
        for evaluation, outputs in zip(affected, run_experts(self.base.weights, jobs), strict=True):
            evaluation.set_value(ExpertValue.EXPERT_OUTPUTS, outputs)

    def _score_all_and_decoded(
        self,
        hypothesis: Hypothesis,
        predictions: Mapping[Site, SitePrediction],
        judged: torch.Tensor,
        *,
        judged_if_right: torch.Tensor,
        keeps_predicted: bool = False,
    ) -> list[Score]:
        """Score a mistake of all tokens, and the same of decoded tokens alone."""
        scores = [
            score_predictions(
                hypothesis,
                predictions,
                yardsticks=self.yardsticks,
                judged=judged,
                is_decode_only=False,
                keeps_predicted=keeps_predicted,
            )
        ]
        if bool(self.is_decoded.any()):
            decoded = {
                site: prediction.limited_to(self.is_decoded, self.yardsticks[site].exact)
                for site, prediction in predictions.items()
            }
            counted = torch.where(self.is_decoded, judged, judged_if_right)
            scores.append(
                score_predictions(
                    hypothesis, decoded, yardsticks=self.yardsticks, judged=counted, is_decode_only=True
                )
            )
        return scores

    def _growth(self, evaluation: Evaluation, site: Site) -> torch.Tensor:
        """Return by how much a site's squared norm exceeds the base's, [T]: larger values err more in rounding."""
        growth = torch.zeros(len(self.base.tokens))
        # The output holds the rounding errors of both deltas too, so their growth is added to its own.
        deltas = (Site.ATTN_DELTA, evaluation.inputs.graph.last_delta)
        for grown in (site, *deltas) if site is Site.OUTPUT else (site,):
            added = _squares(evaluation.rows(grown)) - _squares(self.base.rows(grown))
            growth = growth + added.clamp(min=0.0)
        return growth


def _select(yardsticks: Mapping[Site, Yardstick], indices: torch.Tensor) -> Mapping[Site, Yardstick]:
    return {site: yardstick.select_tokens(indices) for site, yardstick in yardsticks.items()}


def settled_tokens(evaluation: Evaluation, logit_noise: float) -> torch.Tensor:
    """Find the tokens whose experts stay the same whatever noise is on the router's logits: bool [T]."""
    if evaluation.graph.is_dense:
        return torch.ones(len(evaluation.tokens), dtype=torch.bool)
    logits = evaluation[Site.ROUTER_LOGITS]
    experts = evaluation[Site.ROUTER_EXPERTS].sort(-1).values
    settled = torch.ones(len(logits), dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_NUM_DRAWS):
        noise = torch.randn(logits.shape, generator=generator) * (_NOISE_FACTOR * logit_noise)
        noisy = evaluation.with_value(Site.ROUTER_LOGITS, logits + noise)
        settled &= (noisy[Site.ROUTER_EXPERTS].sort(-1).values == experts).all(-1)
    return settled


def _recompute(nodes: frozenset[GraphNode]) -> Hypothesis:
    """Return the hypothesis without a mistake that computes these nodes anew, from the values of the base."""
    change = Change(stages={node: STAGES[node] for node in nodes})
    return Hypothesis(mistakes=(), parameters=(), change=change)


def _squares(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().sum(-1)

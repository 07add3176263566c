"""Trial: hypotheses judged by what the port gave at some sites, for all tokens or for a few of them.

T tokens, E experts, k experts per token, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from compare.diagnosis.evaluation import STAGES, Change, Evaluation, ExpertValue, GraphNode
from compare.diagnosis.expert_pass import run_experts
from compare.diagnosis.mistake import Hypothesis
from compare.diagnosis.yardstick import Yardstick, trimmed_mean
from minimax_tools.model.sites import Site

# Experts' outputs held at a time, float32: a layer of true size was diagnosed within 8 GB (BENCHMARKS.md).
_MOST_BYTES = 1_500_000_000
# Noise of twice the golden's: golden and port each have their own, and the port's may be larger. A token whose experts
# stay the same in 6 draws changes them with a chance of less than about a third.
_DRAWS = 6
_NOISE_FACTOR = 2.0
# Fewer settled tokens may all be near ties. The screening begins with 24 tokens.
_FEWEST_TOKENS = 6
# (Σx)² / Σx² of the tokens' weights: with fewer, one token decides, and the spread over tokens tells nothing.
_FEWEST_EFFECTIVE = 4.0
_STREAMS = (Site.ATTN_DELTA, Site.MOE_DELTA)
_ROUTER = frozenset({Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS})
_NEEDS_EXPERTS = (Site.MOE_DELTA, Site.OUTPUT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """Fit of a hypothesis to the port's values.

    Args:
        hypothesis: What was supposed.
        is_decode_only: Whether it was supposed of the decoded rows alone.
        leaves: ρ = ‖port − hypothesis‖ / ‖golden − float32‖ over the settled tokens, every channel and token in units
            of its own noise: the site where that is largest.
        unexplained: The same for the layer without a mistake.
        misfit: Mean over the sites of the squares of what is left.
        explains: Share of the error's energy that the hypothesis takes away.
        amplitude: The port's error along the one that is predicted; near 1 where the hypothesis is right.
        z: The amplitude in units of its own uncertainty over tokens.
        likeness: Squared correlation of the port's error with the one that is predicted.
        num_tokens: How many tokens it was judged by.
    """

    hypothesis: Hypothesis
    is_decode_only: bool
    leaves: float
    unexplained: float
    misfit: float
    explains: float
    amplitude: float
    z: float
    likeness: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prediction:
    """Values [T,F] of a site under a hypothesis, and the growth in squares of what is added there, [T]."""

    rows: torch.Tensor
    growth: torch.Tensor = field(default_factory=lambda: torch.zeros(1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """A layer's noise and both sides' values, by which hypotheses are judged.

    Args:
        base: The layer without a mistake, of these tokens.
        on_golden_values: The same, each of its stages computed from the golden's own values where it holds them; None
            where the layer inherits errors.
        yardsticks: The sites that judge.
        logit_noise: Standard deviation of what BF16 does to the router's logits.
        is_decoded: Which tokens were decoded, bool [T].
        is_usable: Which tokens the port gave finite values for, bool [T].
    """

    base: Evaluation
    on_golden_values: Evaluation | None
    yardsticks: Mapping[Site, Yardstick]
    logit_noise: float
    is_decoded: torch.Tensor
    is_usable: torch.Tensor

    def at(self, places: torch.Tensor) -> Trial:
        """Return the trial of some of the tokens."""
        return replace(
            self,
            base=self.base.at(places),
            on_golden_values=None if self.on_golden_values is None else self.on_golden_values.at(places),
            yardsticks={site: yardstick.at(places) for site, yardstick in self.yardsticks.items()},
            is_decoded=self.is_decoded[places],
            is_usable=self.is_usable[places],
        )

    def judge(self, hypotheses: Sequence[Hypothesis]) -> list[Score]:
        """Score hypotheses; where rows were decoded, each is also supposed of these alone."""
        scores = []
        settled = self.settled
        for hypothesis, evaluation in self.evaluate(hypotheses):
            predicted = {
                site: _Prediction(rows=evaluation.rows(site), growth=self._growth(evaluation, site))
                for site in self.yardsticks
            }
            judged = settled & self._settled(evaluation)
            scores += self._score_scopes(hypothesis, predicted, judged, elsewhere=settled)
        return scores

    def judge_faint(self, hypotheses: Sequence[Hypothesis]) -> list[Score]:
        """Score mistakes that may be fainter than the noise; none where the layer inherits errors.

        Mistake and right layer are both computed from the golden's own BF16 values, since a rounding depends on the
        bits that it rounds. Their difference is added to the float32 layer. A router's mistake is judged by all
        tokens: it shows where experts are nearly tied.
        """
        if self.on_golden_values is None:
            return []
        clean: dict[frozenset[GraphNode], dict[Site, torch.Tensor]] = {}
        right = {hypothesis.change.nodes: _right(hypothesis.change.nodes) for hypothesis in hypotheses}
        for hypothesis, evaluation in self.evaluate(list(right.values()), base=self.on_golden_values):
            clean[hypothesis.change.nodes] = {site: evaluation.rows(site) for site in self.yardsticks}
        scores = []
        for hypothesis, evaluation in self.evaluate(hypotheses, base=self.on_golden_values):
            origin = clean[hypothesis.change.nodes]
            predicted = {
                site: _Prediction(rows=yardstick.exact + evaluation.rows(site) - origin[site])
                for site, yardstick in self.yardsticks.items()
            }
            judged = self.is_usable if hypothesis.sites & _ROUTER else self.settled
            scores += self._score_scopes(hypothesis, predicted, judged, elsewhere=judged)
        return scores

    def evaluate(
        self, hypotheses: Sequence[Hypothesis], *, base: Evaluation | None = None
    ) -> Iterator[tuple[Hypothesis, Evaluation]]:
        """Evaluate the layer, or another base, under each hypothesis; the experts of many run together."""
        k, hidden = self.base.spec.num_experts_per_tok, self.base.spec.hidden_size
        at_once = max(_MOST_BYTES // (4 * len(self.base.tokens) * k * hidden), 1)
        for start in range(0, len(hypotheses), at_once):
            some = hypotheses[start : start + at_once]
            evaluations = [(base or self.base).changed(hypothesis.change) for hypothesis in some]
            self._run_experts([one for one in evaluations if one.is_affected(ExpertValue.EXPERT_OUTPUTS)])
            yield from zip(some, evaluations, strict=True)

    @property
    def settled(self) -> torch.Tensor:
        """Tokens of the right layer whose experts no noise changes, bool [T]."""
        return self._settled(self.base)

    def null(self) -> Score:
        """Score the layer without a mistake."""
        nothing = Hypothesis(mistakes=(), parameters=(), change=Change())
        right = {site: _Prediction(rows=yardstick.exact) for site, yardstick in self.yardsticks.items()}
        return self._score(nothing, right, self.settled, is_decode_only=False)

    def _settled(self, evaluation: Evaluation) -> torch.Tensor:
        return settled_tokens(evaluation, self.logit_noise) & self.is_usable

    def _run_experts(self, evaluations: list[Evaluation]) -> None:
        if not evaluations or not any(site in self.yardsticks for site in _NEEDS_EXPERTS):
            return
        jobs = [evaluation.expert_job() for evaluation in evaluations]
        for evaluation, outputs in zip(evaluations, run_experts(self.base.weights, jobs), strict=True):
            evaluation.give(ExpertValue.EXPERT_OUTPUTS, outputs)

    def _score_scopes(
        self,
        hypothesis: Hypothesis,
        predicted: Mapping[Site, _Prediction],
        settled: torch.Tensor,
        *,
        elsewhere: torch.Tensor,
    ) -> list[Score]:
        """Score all rows, and decoded ones alone; `elsewhere` are the tokens that are settled without the mistake."""
        scores = [self._score(hypothesis, predicted, settled, is_decode_only=False)]
        if bool(self.is_decoded.any()):
            judged = torch.where(self.is_decoded, settled, elsewhere)
            scores.append(self._score(hypothesis, predicted, judged, is_decode_only=True))
        return scores

    def _score(
        self,
        hypothesis: Hypothesis,
        predicted: Mapping[Site, _Prediction],
        settled: torch.Tensor,
        *,
        is_decode_only: bool,
    ) -> Score:
        rests, nulls = [], []
        energy, rest = 0.0, 0.0
        along, across, whole = torch.zeros(3, len(settled)).double()
        for site, yardstick in self.yardsticks.items():
            prediction, growth = predicted[site].rows, predicted[site].growth
            if is_decode_only:
                prediction = torch.where(self.is_decoded[:, None], prediction, yardstick.exact)
                growth = torch.where(self.is_decoded, growth, 0.0)
            variance = yardstick.widened(growth)
            left = yardstick.misfit(prediction, variance)[settled]
            null = yardstick.misfit(yardstick.exact, yardstick.variance)[settled]
            same_scale = yardstick.misfit(yardstick.exact, variance)[settled]
            rests.append(trimmed_mean(left))
            nulls.append(trimmed_mean(null))
            rest += trimmed_mean(left)
            energy += trimmed_mean(same_scale)
            one_along, one_across, one_whole = yardstick.project(prediction, variance)
            along, across, whole = along + one_along, across + one_across, whole + one_whole
        enough = int(settled.sum()) >= min(_FEWEST_TOKENS, len(settled))
        amplitude, z = _fit_amplitude(along[settled], across[settled])
        return Score(
            hypothesis=hypothesis,
            is_decode_only=is_decode_only,
            leaves=math.sqrt(max(rests)) if enough else math.inf,
            unexplained=math.sqrt(max(nulls)),
            misfit=sum(rests) / len(rests) if enough else math.inf,
            explains=1.0 - rest / energy if energy > 0.0 and math.isfinite(rest) else 0.0,
            amplitude=amplitude,
            z=z,
            likeness=_likeness(along[settled], across[settled], whole[settled]),
            num_tokens=int(settled.sum()),
        )

    def _growth(self, evaluation: Evaluation, site: Site) -> torch.Tensor:
        """Return the growth in squares of what is added to the stream, or of the site itself, over the base's: [T]."""
        grown = (site, *(_STREAMS if site is Site.OUTPUT else ()))
        return sum(
            (
                (_squares(evaluation.rows(one)) - _squares(self.base.rows(one))).clamp(min=0.0)
                for one in grown
            ),
            start=torch.zeros(len(self.base.tokens)),
        )


def _right(nodes: frozenset[GraphNode]) -> Hypothesis:
    """Return the right layer, computed anew from these nodes on."""
    return Hypothesis(
        mistakes=(), parameters=(), change=Change(stages={node: STAGES[node] for node in nodes})
    )


def settled_tokens(evaluation: Evaluation, logit_noise: float) -> torch.Tensor:
    """Find tokens whose experts are the same whatever noise is on the router's logits: bool [T]."""
    logits = evaluation[Site.ROUTER_LOGITS]
    right_experts = evaluation[Site.ROUTER_EXPERTS].sort(-1).values
    settled = torch.ones(len(logits), dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_DRAWS):
        noise = torch.randn(logits.shape, generator=generator) * (_NOISE_FACTOR * logit_noise)
        noisy = evaluation.with_value(Site.ROUTER_LOGITS, logits + noise)
        settled &= (noisy[Site.ROUTER_EXPERTS].sort(-1).values == right_experts).all(-1)
    return settled


def _fit_amplitude(along: torch.Tensor, across: torch.Tensor) -> tuple[float, float]:
    """Return the factor that fits best over tokens, and its ratio to its uncertainty."""
    total = float(across.sum())
    if total <= 0.0 or not math.isfinite(total) or not bool(along.isfinite().all()):
        return 0.0, 0.0
    amplitude = float(along.sum()) / total
    # A single token tells no spread.
    if total**2 < _FEWEST_EFFECTIVE * float(across.square().sum()):
        return amplitude, 0.0
    spread = float((along - amplitude * across).square().sum().sqrt())
    return amplitude, amplitude * total / spread if spread > 0.0 else math.inf


def _likeness(along: torch.Tensor, across: torch.Tensor, whole: torch.Tensor) -> float:
    product = float(across.sum() * whole.sum())
    return float(along.sum()) ** 2 / product if 0.0 < product < math.inf else 0.0


def _squares(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().sum(-1)

"""Screening: hypotheses are judged on few tokens first, and the best of them on more; their parameters are fitted.

A mistake of attention costs a run of all experts: what does not resemble the error on the first tokens goes no
further. Where the error is large, the first tokens may prove a mistake.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

import torch

from compare.catalogue.mistake import Hypothesis
from compare.diagnosis.layer_case import spread_tokens
from compare.diagnosis.score import FAINT_RHO, PROOF_RHO, Score, best_first, is_proof
from compare.diagnosis.trial import Trial
from compare.sides.sides import spread_evenly

logger = logging.getLogger(__name__)


# With 5 points on a logarithmic scale, a round narrows the bracket threefold: a factor of 16 becomes 3 % in 4 rounds. A
# faint factor such as 0.97 lies far from the candidates 0.5 and 2, and takes up to 7 (DECISIONS.md).
_POINTS = 5
_ROUNDS, _MOST_ROUNDS = 4, 7
# Rounds after which a value must have taken away a part of the error, else it is not the cause.
_FIRST_ROUNDS, _LEAST_TAKEN = 2, 0.3
# A score's amplitude is the factor on the predicted error that fits the port's best: off 1 by more, the value is not
# found yet.
_AMPLITUDE_OFF = 0.1
# The same of a factor, which steps towards an amplitude of 1, so many times at most.
_AMPLITUDE_OFF_FACTOR, _MOST_STEPS = 0.003, 3
# Relative difference of a value and the same value computed again, which may differ in its last bits.
_SAME_VALUE = 1e-9
# Factor by which the search may go beyond the smallest and the largest candidate.
_REACH = 4.0
# Factor on the misfit (mean ρ² that is left) by which a fitted value must beat a candidate: code really has those.
_SAME_MISFIT = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bracket:
    """Range in which a parameter is searched; both ends are positive."""

    low: float
    high: float

    def points(self, *, is_whole: bool) -> tuple[float, ...]:
        """Return values within it, evenly spread on a logarithmic scale."""
        step = (self.high / self.low) ** (1.0 / (_POINTS + 1))
        points = [self.low * step**index for index in range(1, _POINTS + 1)]
        if is_whole:
            points = [max(round(point), 1) for point in points]
        return tuple(dict.fromkeys(points))

    def around(self, value: float, points: Sequence[float]) -> _Bracket:
        """Return the narrower bracket between the two points that are next to a value."""
        # The middle point is the value itself, up to its last bits.
        others = [point for point in points if not math.isclose(point, value, rel_tol=_SAME_VALUE)]
        return _Bracket(
            low=max((point for point in (self.low, *others) if point < value), default=self.low),
            high=min((point for point in (self.high, *others) if point > value), default=self.high),
        )


def fit_parameters(trial: Trial, scores: Sequence[Score]) -> list[Score]:
    """Return each score, or a better one with a parameter between the catalogue's candidates."""
    best = step_factors(trial, scores)
    for number in range(max((len(score.hypothesis.mistakes) for score in scores), default=0)):
        best = _fit_mistake(trial, best, number)
    return best


def step_factors(trial: Trial, scores: Sequence[Score]) -> list[Score]:
    """Return each score of a factor on one site with the factor that its amplitude asks for, or as it is."""
    best = list(scores)
    for _ in range(_MOST_STEPS):
        values = {
            index: 1.0 + score.amplitude * (_fitted_value(score.hypothesis, 0) - 1.0)
            for index, score in enumerate(best)
            if is_single_factor(score) and abs(score.amplitude - 1.0) > _AMPLITUDE_OFF_FACTOR
        }
        # No code has a factor that is not positive.
        steps = {
            index: _with_value(best[index].hypothesis, 0, value)
            for index, value in values.items()
            if value > 0
        }
        if not steps:
            break
        judged = trial.judge(list(steps.values()))
        for index, hypothesis in steps.items():
            rivals = [
                score
                for score in judged
                if score.hypothesis is hypothesis and score.is_decode_only == best[index].is_decode_only
            ]
            best[index] = min([best[index], *rivals], key=lambda score: score.misfit)
    return best


def is_single_factor(score: Score) -> bool:
    """Decide whether a hypothesis is a factor on one site: its predicted error grows with its distance from 1."""
    return len(score.hypothesis.mistakes) == 1 and score.hypothesis.is_factor


def _fit_mistake(trial: Trial, scores: list[Score], number: int) -> list[Score]:
    """Fit mistake `number` (0, or 1 in a pair) of each hypothesis; all are tried together, to share the experts."""
    best = list(scores)
    brackets = {
        index: _first_bracket(trial, score.hypothesis, number)
        for index, score in enumerate(scores)
        if number < len(score.hypothesis.mistakes) and score.hypothesis.mistakes[number].fitted
        # Of a factor, the amplitude tells whether its steps have found it.
        if not is_single_factor(score) or abs(score.amplitude - 1.0) > _AMPLITUDE_OFF
    }
    for round_number in range(_MOST_ROUNDS):
        if round_number == _FIRST_ROUNDS:
            brackets = {index: bracket for index, bracket in brackets.items() if _leads(best[index])}
        if round_number >= _ROUNDS:
            brackets = {
                index: bracket
                for index, bracket in brackets.items()
                if abs(best[index].amplitude - 1.0) > _AMPLITUDE_OFF
            }
        if not brackets:
            break
        best, brackets = _narrow(trial, best, brackets, number)
    # The catalogue's own value stays, unless the fitted one is clearly better.
    return [
        score if score.misfit <= _SAME_MISFIT * fitted.misfit else fitted
        for score, fitted in zip(scores, best, strict=True)
    ]


def _leads(score: Score) -> bool:
    """Decide whether a hypothesis takes away a part of a clear error; a faint one may still grow."""
    return score.unexplained < PROOF_RHO or score.explains >= _LEAST_TAKEN


def _narrow(
    trial: Trial, scores: list[Score], brackets: Mapping[int, _Bracket], number: int
) -> tuple[list[Score], dict[int, _Bracket]]:
    """Try the points of each bracket, by the index of its score: return the best scores and narrower brackets."""
    best, narrower = list(scores), {}
    points = {
        index: bracket.points(is_whole=scores[index].hypothesis.mistakes[number].is_whole)
        for index, bracket in brackets.items()
    }
    tried = {
        index: [_with_value(scores[index].hypothesis, number, value) for value in values]
        for index, values in points.items()
    }
    # A hypothesis gets two scores if tokens were decoded: for all tokens, and for the decoded ones alone.
    judged = trial.judge([hypothesis for hypotheses in tried.values() for hypothesis in hypotheses])
    for index, hypotheses in tried.items():
        is_decode_only = scores[index].is_decode_only
        rivals = [
            score
            for score in judged
            if score.hypothesis in hypotheses and score.is_decode_only == is_decode_only
        ]
        best[index] = min([scores[index], *rivals], key=lambda score: score.misfit)
        value = _fitted_value(best[index].hypothesis, number)
        narrower[index] = brackets[index].around(value, points[index])
    return best, narrower


def _with_value(hypothesis: Hypothesis, number: int, value: float) -> Hypothesis:
    parameters = list(hypothesis.parameters)
    parameters[number] = MappingProxyType(
        {**parameters[number], str(hypothesis.mistakes[number].fitted): value}
    )
    changed = (
        mistake.with_parameters(values, is_fitted=True)
        for mistake, values in zip(hypothesis.mistakes, parameters, strict=True)
    )
    return reduce(Hypothesis.and_also, changed)


def _first_bracket(trial: Trial, hypothesis: Hypothesis, number: int) -> _Bracket:
    mistake, value = hypothesis.mistakes[number], _fitted_value(hypothesis, number)
    candidates = sorted(
        float(parameters[str(mistake.fitted)]) for parameters in mistake.candidates(trial.base.inputs)
    )
    widest = _Bracket(low=min(*candidates, value) / _REACH, high=max(*candidates, value) * _REACH)
    return widest.around(value, candidates)


def _fitted_value(hypothesis: Hypothesis, number: int) -> float:
    value = hypothesis.parameters[number][str(hypothesis.mistakes[number].fitted)]
    assert isinstance(value, (int, float)), "fitted parameters are numbers"
    return float(value)


# Some 450 hypotheses are screened on few tokens: a mistake of attention changes the experts' input, and costs a run of
# all experts. What a layer of true size takes with these numbers stands in BENCHMARKS.md.
_FIRST_TOKENS, _SCREENING_TOKENS = 24, 64
# First tokens where the error is so large that they may prove a mistake: all of them settled.
_PROVING_TOKENS = 12
# Hypotheses that are judged beside one that the first tokens prove: up to so many times its misfit, they may be better
# on all tokens.
_NEAR_PROOF = 1.5
# Likeness from which a hypothesis leads somewhere: what explains a part, or has a wrong parameter, reaches it.
_LEAST_LIKENESS = 0.1
# z from which the first tokens may show a mistake that all tokens prove.
_LEAST_Z = 1.0
# Hypotheses that go from the first tokens to the screening ones: three times the finalists by misfit, all that are
# better than no mistake, and a few by likeness, which stays high where a parameter is far off (DECISIONS.md).
_MOST_SURVIVORS = 30
_MOST_TIED = 3  # beside the best parameters of one, others that say the same of the first tokens
_MOST_ALIKE = 8
# Likeness of such a one, in units of the largest.
_LEAST_AS_ALIKE = 0.5
# Fitting tries 5 values in 4 to 7 rounds: 6 hypotheses are 120 to 210 trials beside the 450.
_MOST_FITTED = 6
# Hypotheses that are judged on all tokens: the best by misfit, and the best by z, whose error the noise may cover.
_MOST_FINALISTS, _MOST_FAINT = 10, 5


def open_screen(trial: Trial) -> Trial:
    """Return the trial of the screening tokens."""
    lengths = trial.base.inputs.is_judged.sum(-1).tolist()
    num_tokens = len(trial.base.tokens)
    indices = spread_tokens(num_tokens, lengths, _SCREENING_TOKENS)
    return trial if len(indices) == num_tokens else trial.select_tokens(indices)


def open_first(trial: Trial, null: Score) -> tuple[Trial, bool]:
    """Return the trial of the first tokens, and whether they may prove a mistake."""
    if len(trial.base.tokens) <= 1.5 * _FIRST_TOKENS:
        return trial, False
    # A few rows may hold all wrong tokens: others say nothing of a mistake.
    is_wrong = null.misfits.nan_to_num(0.0) >= PROOF_RHO**2
    # Only a large error is proved.
    proving = (
        _in_few_rows(trial, trial.settled, is_wrong, _PROVING_TOKENS) if null.leaves >= PROOF_RHO else None
    )
    if proving is not None:
        return proving, True
    return _in_few_rows(trial, torch.ones_like(trial.settled), is_wrong, _FIRST_TOKENS) or trial, False


def _in_few_rows(trial: Trial, is_chosen: torch.Tensor, is_wrong: torch.Tensor, most: int) -> Trial | None:
    """Return the trial of some of the chosen tokens, bool [T], in as few rows as hold so many; None if none do.

    Rows with the most wrong tokens, bool [T], come first, the longest of them at the front. Where few tokens are wrong,
    half of those that are taken are wrong ones.
    """
    rows = trial.base.tokens // trial.base.attention_mask.shape[1]
    num_rows = int(rows.max()) + 1
    counts = torch.bincount(rows[is_chosen], minlength=num_rows)
    num_wrong = torch.bincount(rows[is_chosen & is_wrong], minlength=num_rows)
    by_length = counts.argsort(descending=True, stable=True)
    ranked = by_length[num_wrong[by_length].argsort(descending=True, stable=True)]
    num_taken = int((counts[ranked].cumsum(0) < most).sum()) + 1
    indices = (is_chosen & torch.isin(rows, ranked[:num_taken])).nonzero().flatten()
    if len(indices) < most:
        return None
    wrong, others = indices[is_wrong[indices]], indices[~is_wrong[indices]]
    if len(wrong) >= len(others):
        return trial.select_tokens(indices[spread_evenly(len(indices), most)])
    wrong = wrong[spread_evenly(len(wrong), most // 2)]
    others = others[spread_evenly(len(others), most - len(wrong))]
    return trial.select_tokens(torch.cat((wrong, others)).sort().values)


def judge_proved(trial: Trial, first: Trial, scores: Sequence[Score]) -> list[Score]:
    """Score on all tokens what the first tokens prove, and what is near it; none if they prove nothing."""
    best = min(scores, key=lambda score: score.misfit)
    # A hypothesis may unsettle tokens: with too few left, they say nothing for or against it.
    unjudged = [score for score in scores if math.isinf(score.misfit)]
    if not is_proof(best) or len(unjudged) > _MOST_FINALISTS:
        return []
    near = [score for score in scores if score.misfit <= _NEAR_PROOF * best.misfit]
    alike = step_factors(first, most_alike(scores))
    return _judge_on_all(trial, list(dict.fromkeys([*near, *unjudged, *alike])))


def judge_survivors(first: Trial, screen: Trial, scores: Sequence[Score]) -> list[Score]:
    """Score on the screening tokens the hypotheses that lead somewhere on the first ones."""
    if first is screen:
        return list(scores)
    ranked = best_first(scores)
    null = first.null().misfit
    chosen = [*ranked[:_MOST_SURVIVORS], *most_alike(_with_fitted_parameter(ranked))]
    names = {score.hypothesis.name for score in chosen if leads_somewhere(score)}
    # One that unsettles most of the first tokens may leave enough of the screening ones.
    names |= {
        score.hypothesis.name
        for score in ranked
        if score.is_silent or score.misfit < null or math.isinf(score.misfit)
    }
    survivors = hypotheses_of(
        [one for score in ranked if score.hypothesis.name in names for one in _tied(score, scores)]
    )
    logger.info("Trying the best %d on %d tokens.", len(survivors), len(screen.base.tokens))
    return screen.judge(survivors)


def _tied(best: Score, scores: Sequence[Score]) -> list[Score]:
    """Return the best score of a mistake, with those of other parameters that few tokens cannot tell from it."""
    rivals = [
        score
        for score in scores
        if score.hypothesis.name == best.hypothesis.name and score.is_decode_only == best.is_decode_only
        if score is not best and (score.misfit <= _SAME_MISFIT * best.misfit or math.isinf(score.misfit))
    ]
    return [best, *rivals[:_MOST_TIED]]


def leads_somewhere(score: Score) -> bool:
    """Decide whether a hypothesis resembles the error in some way, or few tokens say nothing of it."""
    return (
        score.likeness >= _LEAST_LIKENESS
        or score.explains >= _LEAST_LIKENESS
        or score.unexplained <= FAINT_RHO
        or math.isinf(score.misfit)
    )


def judge_faint(trial: Trial, screen: Trial, scores: Sequence[Score]) -> list[Score]:
    """Score again, as filters, the hypotheses that the noise may cover (see `Trial.judge_faint`)."""
    hypotheses = hypotheses_of([score for score in scores if _may_be_faint(score)])
    logger.info("Trying %d hypotheses as filters.", len(hypotheses))
    screened = best_first(screen.judge_faint(hypotheses))
    best = sorted(screened, key=lambda score: score.z, reverse=True)[:_MOST_FINALISTS]
    chosen = list(dict.fromkeys([*best, *most_alike(screened)]))
    return chosen if screen is trial else trial.judge_faint(hypotheses_of(chosen))


def _may_be_faint(score: Score) -> bool:
    return score.hypothesis.is_rounding or abs(score.z) >= _LEAST_Z or score.is_silent


def judge_finalists(trial: Trial, screen: Trial, scores: Sequence[Score]) -> list[Score]:
    """Fit the parameters of the best scores, and judge them on all tokens."""
    best = best_first(scores)
    faint = sorted(best, key=lambda score: abs(score.z), reverse=True)[:_MOST_FAINT]
    finalists = list(dict.fromkeys([*best[:_MOST_FINALISTS], *faint]))
    if best and not is_proof(best[0]):
        # A parameter that is far off spoils the misfit, but not the direction of the predicted error.
        fitted = [score for score in _with_fitted_parameter(best) if leads_somewhere(score)]
        candidates = [
            *(score for score in fitted if is_single_factor(score)),
            *(score for score in best[:_MOST_FITTED] if score in fitted),
            *most_alike(fitted),
        ]
        unfitted = list(dict.fromkeys(candidates))
        logger.info("Fitting the parameters of the best %d.", len(unfitted))
        others = [score for score in finalists if score not in unfitted]
        finalists = [*fit_parameters(screen, unfitted), *others]
    else:
        # A factor of another size may explain the port as well as what is proved.
        finalists += step_factors(screen, most_alike(best))
    return finalists if screen is trial else _judge_on_all(trial, list(dict.fromkeys(finalists)))


def _judge_on_all(trial: Trial, scores: Sequence[Score]) -> list[Score]:
    """Score again, on all tokens, the hypotheses of scores on fewer tokens."""
    logger.info("Judging the best %d on %d tokens.", len(scores), len(trial.base.tokens))
    # `judge` scores each hypothesis in all rows and in decoded ones; only those of both that are asked for count.
    judged = trial.judge(hypotheses_of(scores))
    wanted = {(id(score.hypothesis), score.is_decode_only) for score in scores}
    return [score for score in judged if (id(score.hypothesis), score.is_decode_only) in wanted]


def hypotheses_of(scores: Sequence[Score]) -> list[Hypothesis]:
    """Return the hypotheses of scores, each once though it may have a score of decoded tokens too."""
    return list({id(score.hypothesis): score.hypothesis for score in scores}.values())


def most_alike(scores: Sequence[Score], most: int = _MOST_ALIKE) -> list[Score]:
    """Return the scores whose predicted error is nearest to the port's in direction, whatever its size."""
    ranked = sorted(scores, key=lambda score: score.likeness, reverse=True)[:most]
    return [score for score in ranked if score.likeness >= _LEAST_AS_ALIKE * ranked[0].likeness]


def _with_fitted_parameter(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if any(mistake.fitted for mistake in score.hypothesis.mistakes)]

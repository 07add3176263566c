"""Fitting: the parameter of a mistake that explains the port best, searched between the catalogue's candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from compare.diagnosis.mistake import Hypothesis
from compare.diagnosis.naming import PROOF_RHO
from compare.diagnosis.score import Score
from compare.diagnosis.trial import Trial

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
    """Replace the fitted parameter of mistake `number`."""
    parameters = list(hypothesis.parameters)
    parameters[number] = MappingProxyType(
        {**parameters[number], str(hypothesis.mistakes[number].fitted): value}
    )
    changed, *others = (
        mistake.with_parameters(values, is_fitted=True)
        for mistake, values in zip(hypothesis.mistakes, parameters, strict=True)
    )
    for other in others:
        changed = changed.and_also(other)
    return changed


def _first_bracket(trial: Trial, hypothesis: Hypothesis, number: int) -> _Bracket:
    """Return the bracket between the neighbours of a parameter among the catalogue's candidates."""
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

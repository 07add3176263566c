"""Fitting: the parameter of a mistake that explains the port best, searched between the catalogue's candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

from compare.diagnosis.mistake import Hypothesis, Parameters
from compare.diagnosis.trial import Score, Trial

# With 5 points on a logarithmic scale, a round narrows the bracket threefold: a factor of 16 becomes 3 % in 4 rounds. A
# faint factor such as 0.97 lies far from the candidates 0.5 and 2, and takes up to 7 (DECISIONS.md).
_POINTS = 5
_ROUNDS, _MOST_ROUNDS = 4, 7
# An amplitude this far from 1 says that the value is not found yet.
_AMPLITUDE_OFF = 0.1
# Last bits of a point that is computed again.
_SAME_VALUE = 1e-9
# Beyond the first and the last candidate, how far the search may go.
_REACH = 4.0
# A candidate of the catalogue is a value that code has: it wins where it explains as much.
_SAME = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bracket:
    """Between which values a parameter is searched."""

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
        """Return the narrower bracket between the neighbours of a value."""
        # The middle of a bracket is the value itself again, but for its last bits.
        others = [point for point in points if not math.isclose(point, value, rel_tol=_SAME_VALUE)]
        return _Bracket(
            low=max((point for point in (self.low, *others) if point < value), default=self.low),
            high=min((point for point in (self.high, *others) if point > value), default=self.high),
        )


def fit_parameters(trial: Trial, scores: Sequence[Score]) -> list[Score]:
    """Return each score, or a better one with a parameter between the catalogue's candidates.

    Args:
        trial: Judges hypotheses.
        scores: One of each hypothesis that is worth it.
    """
    best = list(scores)
    for part in range(max((len(score.hypothesis.mistakes) for score in scores), default=0)):
        best = _fit_part(trial, best, part)
    return best


def _fit_part(trial: Trial, scores: list[Score], part: int) -> list[Score]:
    """Fit one mistake of each hypothesis; the experts' weights are read once a round for all of them."""
    best = list(scores)
    brackets = {
        index: _first_bracket(trial, score.hypothesis, part)
        for index, score in enumerate(scores)
        if part < len(score.hypothesis.mistakes) and score.hypothesis.mistakes[part].fitted
    }
    for number in range(_MOST_ROUNDS):
        if number >= _ROUNDS:
            brackets = {
                index: bracket
                for index, bracket in brackets.items()
                if abs(best[index].amplitude - 1.0) > _AMPLITUDE_OFF
            }
        if not brackets:
            break
        points = {
            index: bracket.points(is_whole=best[index].hypothesis.mistakes[part].is_whole)
            for index, bracket in brackets.items()
        }
        tried = {
            index: [_with_value(best[index].hypothesis, part, point) for point in its]
            for index, its in points.items()
        }
        found = trial.judge([hypothesis for its in tried.values() for hypothesis in its])
        for index, its in tried.items():
            rivals = [
                score
                for score in found
                if score.hypothesis in its and score.is_decode_only == best[index].is_decode_only
            ]
            best[index] = min([best[index], *rivals], key=lambda score: score.misfit)
            brackets[index] = brackets[index].around(_value(best[index].hypothesis, part), points[index])
    return [
        first if first.misfit <= _SAME * last.misfit else last
        for first, last in zip(scores, best, strict=True)
    ]


def _with_value(hypothesis: Hypothesis, part: int, value: float) -> Hypothesis:
    """Replace the value of one mistake's fitted parameter."""
    changed: Parameters = MappingProxyType(
        {**hypothesis.parameters[part], str(hypothesis.mistakes[part].fitted): value}
    )
    parameters = [*hypothesis.parameters[:part], changed, *hypothesis.parameters[part + 1 :]]
    singles = [
        mistake.with_parameters(its) for mistake, its in zip(hypothesis.mistakes, parameters, strict=True)
    ]
    return reduce(Hypothesis.and_also, singles)


def _first_bracket(trial: Trial, hypothesis: Hypothesis, part: int) -> _Bracket:
    mistake = hypothesis.mistakes[part]
    value = _value(hypothesis, part)
    others = sorted(
        float(parameters[str(mistake.fitted)]) for parameters in mistake.candidates(trial.base.scene)
    )
    whole = _Bracket(low=min(*others, value) / _REACH, high=max(*others, value) * _REACH)
    return whole.around(value, others)


def _value(hypothesis: Hypothesis, part: int) -> float:
    value = hypothesis.parameters[part][str(hypothesis.mistakes[part].fitted)]
    assert isinstance(value, (int, float)), "fitted parameters are numbers"
    return float(value)

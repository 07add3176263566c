"""Fitting: the parameter of a mistake that explains the port best, searched between the catalogue's candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

from compare.diagnosis.mistake import Hypothesis, Parameters
from compare.diagnosis.trial import Score, Trial

_ROUNDS = 4
_POINTS = 5
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
        """Values within it, evenly spread on a logarithmic scale."""
        step = (self.high / self.low) ** (1.0 / (_POINTS + 1))
        points = [self.low * step**index for index in range(1, _POINTS + 1)]
        return tuple(dict.fromkeys(round(point) for point in points)) if is_whole else tuple(points)

    def around(self, value: float, points: Sequence[float]) -> _Bracket:
        """The narrower bracket between the neighbours of a value."""
        return _Bracket(
            low=max((point for point in (self.low, *points) if point < value), default=self.low),
            high=min((point for point in (self.high, *points) if point > value), default=self.high),
        )


def fit_parameters(trial: Trial, scores: Sequence[Score]) -> list[Score]:
    """Each score or a better one of the same mistakes, with a parameter that is no candidate of the catalogue.

    Args:
        trial: What judges.
        scores: One of each hypothesis that is worth it.
    """
    best = list(scores)
    for part in range(max((len(score.hypothesis.mistakes) for score in scores), default=0)):
        best = _fit_part(trial, best, part)
    return best


def _fit_part(trial: Trial, scores: list[Score], part: int) -> list[Score]:
    best = list(scores)
    brackets = {
        index: _first_bracket(trial, score.hypothesis, part)
        for index, score in enumerate(scores)
        if part < len(score.hypothesis.mistakes) and score.hypothesis.mistakes[part].fitted
    }
    for _ in range(_ROUNDS):
        tried = [
            (index, point, with_value(best[index].hypothesis, part, point))
            for index, bracket in brackets.items()
            for point in bracket.points(is_whole=best[index].hypothesis.mistakes[part].is_whole)
        ]
        found = [
            score
            for score in trial.judge([hypothesis for _, _, hypothesis in tried])
        ]
        by_hypothesis = {
            id(score.hypothesis): score
            for score in found
        }
        del by_hypothesis
        for index in brackets:
            mine = [hypothesis for number, _, hypothesis in tried if number == index]
            points = [point for number, point, _ in tried if number == index]
            rivals = [
                score
                for score in found
                if any(score.hypothesis is one for one in mine)
                and score.is_decode_only == best[index].is_decode_only
            ]
            best[index] = min([best[index], *rivals], key=lambda score: score.misfit)
            brackets[index] = brackets[index].around(_value(best[index].hypothesis, part), points)
    return [
        first if first.misfit <= _SAME * last.misfit else last
        for first, last in zip(scores, best, strict=True)
    ]


def with_value(hypothesis: Hypothesis, part: int, value: float) -> Hypothesis:
    """The hypothesis with another value of one mistake's fitted parameter."""
    name = hypothesis.mistakes[part].fitted
    assert name is not None, "only fitted parameters are searched"
    changed: Parameters = MappingProxyType({**hypothesis.parameters[part], name: value})
    parameters = [*hypothesis.parameters[:part], changed, *hypothesis.parameters[part + 1 :]]
    return join(
        [
            mistake.with_parameters(its)
            for mistake, its in zip(hypothesis.mistakes, parameters, strict=True)
        ]
    )


def join(hypotheses: Sequence[Hypothesis]) -> Hypothesis:
    """Several hypotheses as one."""
    return reduce(Hypothesis.and_also, hypotheses)


def _first_bracket(trial: Trial, hypothesis: Hypothesis, part: int) -> _Bracket:
    mistake = hypothesis.mistakes[part]
    value = _value(hypothesis, part)
    others = sorted(
        float(parameters[str(mistake.fitted)]) for parameters in mistake.candidates(trial.base.scene)
    )
    whole = _Bracket(low=min(*others, value) / _REACH, high=max(*others, value) * _REACH)
    return whole.around(value, others)


def _value(hypothesis: Hypothesis, part: int) -> float:
    parameters: Mapping[str, object] = hypothesis.parameters[part]
    value = parameters[str(hypothesis.mistakes[part].fitted)]
    assert isinstance(value, int | float), "fitted parameters are numbers"
    return float(value)

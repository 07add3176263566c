"""Fitted parameters: which values are tried, when the search ends, and which value stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from compare.catalogue.candidates import values_of
from compare.catalogue.mistake import Hypothesis, Mistake
from compare.diagnosis.score import Score
from compare.diagnosis.screening import fit_parameters
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import replace_stage


def mistake(name: str = "scale", *candidates: float, is_whole: bool = False, fitted: bool = True) -> Mistake:
    return Mistake(
        name=name,
        build=lambda factor: replace_stage(Site.Q_PROJ if name == "scale" else Site.K_PROJ, lambda _: factor),
        candidates=values_of("factor", *candidates),
        fitted="factor" if fitted else None,
        is_whole=is_whole,
    )


def score(
    hypothesis: Hypothesis, *, misfit: float, amplitude: float = 1.0, is_decode_only: bool = False
) -> Score:
    figures = {"leaves": 1.0, "unexplained": 9.0, "explains": 0.5, "z": 9.0, "likeness": 0.5}
    return Score(
        hypothesis=hypothesis, is_decode_only=is_decode_only, misfit=misfit, amplitude=amplitude, **figures
    )


def factors(hypothesis: Hypothesis) -> tuple[Any, ...]:
    return tuple(parameters["factor"] for parameters in hypothesis.parameters)


class Search:
    """A trial that knows the right factors, and notes which were tried in each round."""

    def __init__(
        self, *right: float, amplitude: Callable[..., float] = lambda *_: 1.0, decoded: bool = False
    ) -> None:
        self.right, self.amplitude, self.decoded = right, amplitude, decoded
        self.base = SimpleNamespace(inputs=SimpleNamespace(spec=SimpleNamespace(graph=ModelGraph())))
        self.rounds: list[list[tuple[float, ...]]] = []

    def score(self, hypothesis: Hypothesis, *, is_decode_only: bool = False) -> Score:
        off = sum(
            math.log(found / right) ** 2
            for found, right in zip(factors(hypothesis), self.right, strict=False)
        )
        # All tokens together are off more than the decoded ones, in which the mistake is.
        misfit = 2.0 + off if is_decode_only or not self.decoded else 100.0 - off
        amplitude = self.amplitude(*factors(hypothesis))
        return score(hypothesis, misfit=misfit, amplitude=amplitude, is_decode_only=is_decode_only)

    def judge(self, hypotheses: Sequence[Hypothesis]) -> list[Score]:
        self.rounds.append([factors(hypothesis) for hypothesis in hypotheses])
        scores = [self.score(hypothesis) for hypothesis in hypotheses]
        if self.decoded:
            scores += [self.score(hypothesis, is_decode_only=True) for hypothesis in hypotheses]
        return scores

    def fit(self, *scores: Score) -> list[Score]:
        trial: Any = self
        return fit_parameters(trial, scores)

    def fit_from(self, value: float, *candidates: float, is_whole: bool = False) -> Any:
        start = mistake("scale", *candidates, is_whole=is_whole).with_parameters({"factor": value})
        (found,) = self.fit(self.score(start))
        return factors(found.hypothesis)[0]


@pytest.mark.parametrize("right", [0.65, 1.3, 3.0, 6.0, 20.0])
def test_value_between_and_beyond_the_candidates_is_found(right: float) -> None:
    nearest = min((0.5, 2.0, 8.0), key=lambda value: abs(math.log(value / right)))
    assert Search(right).fit_from(nearest, 0.5, 2.0, 8.0) == pytest.approx(right, rel=0.03)


@pytest.mark.parametrize(("amplitude", "num_rounds"), [(1.0, 4), (1.09, 4), (0.91, 4), (1.11, 7), (0.89, 7)])
def test_search_goes_on_while_the_amplitude_is_off(amplitude: float, num_rounds: int) -> None:
    search = Search(1.9, amplitude=lambda *_: amplitude)
    search.fit_from(2.0, 0.5, 2.0, 8.0)
    assert len(search.rounds) == num_rounds


def test_only_scores_whose_amplitude_is_off_go_on() -> None:
    search = Search(1.9, amplitude=lambda factor: 1.0 if factor < 10.0 else 3.0)
    starts = [mistake("scale", value).with_parameters({"factor": value}) for value in (2.0, 100.0)]
    search.fit(*map(search.score, starts))
    assert [len(tried) for tried in search.rounds] == [10] * 4 + [5] * 3


def test_whole_numbers_are_tried_once_and_are_at_least_1() -> None:
    search = Search(3.0)
    assert search.fit_from(2.0, 2.0, is_whole=True) == 3
    # Between 0.5 and 8 these are 0.79, 1.3, 2, 3.2 and 5.0.
    assert search.rounds[0] == [(1,), (2,), (3,), (5,)]


@pytest.mark.parametrize("right", [3.0, 5.0])
def test_whole_number_may_be_a_neighbouring_candidate(right: float) -> None:
    assert Search(right).fit_from(4.0, 3.0, 4.0, 5.0, is_whole=True) == right


@pytest.mark.parametrize(("misfit", "stays"), [(2.039, True), (2.041, False)])
def test_candidate_stays_unless_the_fitted_value_is_clearly_better(misfit: float, stays: bool) -> None:
    off = math.exp(math.sqrt(misfit - 2.0))
    found = Search(1.0).fit_from(off, off / 2, off, 2 * off)
    assert (found == off) is stays


def test_mistakes_without_a_fitted_parameter_are_left_alone() -> None:
    search = Search(1.0)
    first = search.score(mistake("scale", 2.0, fitted=False).with_parameters({"factor": 2.0}))
    assert (search.fit(first), search.fit(), search.rounds) == ([first], [], [])


def test_score_of_decoded_tokens_is_fitted_by_decoded_tokens() -> None:
    search = Search(1.3, decoded=True)
    start = mistake("scale", 0.5, 2.0).with_parameters({"factor": 2.0})
    (found,) = search.fit(search.score(start, is_decode_only=True))
    assert found.is_decode_only
    assert factors(found.hypothesis)[0] == pytest.approx(1.3, rel=0.03)


def test_both_parameters_of_a_pair_are_fitted_in_turn() -> None:
    search = Search(1.3, 5.0)
    first = mistake("scale", 0.5, 2.0).with_parameters({"factor": 2.0})
    second = mistake("other", 2.0, 8.0).with_parameters({"factor": 8.0})
    pair = first.and_also(second)
    (found,) = search.fit(search.score(pair))
    assert factors(found.hypothesis) == pytest.approx((1.3, 5.0), rel=0.03)
    assert found.hypothesis.name == "scale + other"
    assert found.hypothesis.sites == {Site.Q_PROJ, Site.K_PROJ}
    assert {tried[1] for tried in search.rounds[0]} == {8.0}
    # Beside a pair, a single mistake has no second parameter.
    both = Search(1.3, 5.0)
    alone, _ = both.fit(both.score(first), both.score(pair))
    assert factors(alone.hypothesis) == pytest.approx((1.3,), rel=0.03)
    assert [len(tried) for tried in both.rounds] == [10] * 4 + [5] * 4

"""Scores that explain a port, and those that only come near: each limit lets its own side through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from compare.diagnosis.naming import best_first, is_explanation, is_proof, name_mistakes
from compare.diagnosis.score import Score


def score(name: str = "a", *, is_rounding: bool = False, **figures: float) -> Score:
    hypothesis: Any = SimpleNamespace(name=name, is_rounding=is_rounding)
    usual = {"leaves": 1.0, "unexplained": 20.0, "misfit": 1.0, "explains": 0.99, "amplitude": 1.0, "z": 50.0}
    values = {**usual, "likeness": 0.99, **figures}
    return Score(hypothesis=hypothesis, is_decode_only=False, **values)


@pytest.mark.parametrize(
    ("figures", "explains"),
    [
        ({}, True),
        ({"leaves": 2.0}, True),
        ({"leaves": 2.01}, False),
        ({"explains": 0.0}, False),
        # Of a ρ above 200, a hundredth may be left, at most 10.
        ({"unexplained": 500.0, "leaves": 4.9}, True),
        ({"unexplained": 500.0, "leaves": 5.1}, False),
        ({"unexplained": 5000.0, "leaves": 10.1}, False),
        # Of ρ² - 1 = 8, four fifths must be taken away: 1.6² - 1 is 1.56, 1.62² - 1 is 1.62.
        ({"unexplained": 3.0, "leaves": 1.6, "z": 0.0}, True),
        ({"unexplained": 3.0, "leaves": 1.62, "z": 0.0}, False),
        # A faint error needs z, an amplitude near 1 and a share of the energy.
        ({"unexplained": 1.4, "explains": 0.02, "z": 8.0}, True),
        ({"unexplained": 1.4, "explains": 0.02, "z": 7.9}, False),
        ({"unexplained": 1.4, "explains": 0.019, "z": 8.0}, False),
        ({"unexplained": 1.4, "amplitude": 1.29}, True),
        ({"unexplained": 1.4, "amplitude": 1.31}, False),
        ({"unexplained": 1.4, "amplitude": 0.69}, False),
    ],
)
def test_what_explains_a_port(figures: dict[str, float], explains: bool) -> None:
    assert is_explanation(score(**figures)) is explains


@pytest.mark.parametrize(
    ("figures", "explains"),
    [
        ({"leaves": 3.0, "explains": 0.2, "z": 8.0}, True),
        ({"leaves": 3.0, "explains": 0.19, "z": 8.0}, False),
        ({"leaves": 3.0, "explains": 0.2, "z": 7.9}, False),
        ({"leaves": 3.0, "amplitude": 1.49}, True),
        ({"leaves": 3.0, "amplitude": 0.49}, False),
        ({"unexplained": 1.4, "explains": 0.02}, True),
        ({"unexplained": 1.4, "explains": 0.019}, False),
        # Above the noise, a rounding must leave as little as any other mistake.
        ({"unexplained": 6.1, "leaves": 3.0}, False),
    ],
)
def test_what_explains_a_port_as_a_rounding(figures: dict[str, float], explains: bool) -> None:
    assert is_explanation(score(is_rounding=True, **{"unexplained": 6.0, **figures})) is explains


def test_proof_is_of_a_clear_error_of_which_the_noise_is_left() -> None:
    assert is_proof(score(unexplained=10.0, leaves=1.3))
    assert not is_proof(score(unexplained=9.9, leaves=1.3))
    assert not is_proof(score(unexplained=10.0, leaves=1.31))


def test_a_later_parameter_must_be_clearly_better() -> None:
    first, close, better = (score(misfit=misfit) for misfit in (2.0, 1.97, 1.95))
    assert best_first([first, close]) == [first]
    assert best_first([first, better]) == [better]
    other = score("b", misfit=1.0)
    assert best_first([first, other]) == [other, first]


class TestNames:
    def test_what_resembles_the_best_is_named_too(self) -> None:
        best, like, unlike = score(misfit=2.0), score("b", misfit=2.2), score("c", misfit=2.21)
        assert name_mistakes([unlike, like, best]) == (best, like)

    def test_another_hypothesis_must_not_be_much_likelier(self) -> None:
        alike, unlike = score(likeness=0.8), score("b", likeness=0.79)
        better = score("c", likeness=1.0, leaves=50.0)
        assert name_mistakes([alike, unlike, better]) == (alike,)
        by_chance = score("c", likeness=1.0, leaves=50.0, z=0.0)
        assert name_mistakes([alike, unlike, by_chance]) == (alike,)

    def test_a_rounding_is_held_against_likenesses_that_are_proved(self) -> None:
        rounding = score(is_rounding=True, unexplained=3.0, likeness=0.3)
        for z, named in ((7.9, (rounding,)), (8.0, ())):
            assert name_mistakes([rounding, score("b", likeness=1.0, leaves=50.0, z=z)]) == named

    def test_a_large_rounding_needs_no_likeness_if_none_is_proved(self) -> None:
        rounding = score(is_rounding=True, likeness=0.3, z=0.0)
        assert name_mistakes([rounding]) == (rounding,)

    def test_nothing_is_named_without_an_explanation(self) -> None:
        assert name_mistakes([]) == ()
        assert name_mistakes([score(leaves=50.0)]) == ()

"""Scores that explain a port, and those that only come near: each limit lets its own side through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.diagnosis.score import Score, best_first, describe_port, is_explanation, is_proof, name_mistakes


def score(name: str = "a", *, is_rounding: bool = False, **figures: Any) -> Score:
    usual = {"is_named": True, "is_factor": False, "has_number": False, "is_fitted": False, "parameters": ()}
    chosen = {key: figures.pop(key, value) for key, value in usual.items()}
    hypothesis: Any = SimpleNamespace(name=name, is_rounding=is_rounding, **chosen)
    values = {
        "leaves": 1.0,
        "unexplained": 20.0,
        "misfit": 1.0,
        "explains": 0.99,
        "amplitude": 1.0,
        "z": 50.0,
    }
    return Score(hypothesis=hypothesis, is_decode_only=False, **{**values, "likeness": 0.99, **figures})


@pytest.mark.parametrize(
    ("figures", "explains"),
    [
        ({}, True),
        ({"leaves": 2.0}, True),
        ({"leaves": 2.01}, False),
        # A number that was fitted to the port also fits what is only close.
        ({"leaves": 1.5, "is_fitted": True}, True),
        ({"leaves": 1.51, "is_fitted": True}, False),
        ({"leaves": 4.9, "is_fitted": True, "unexplained": 500.0}, True),
        ({"explains": 0.0}, False),
        # Of a ρ above 200, a hundredth may be left, at most 10.
        ({"unexplained": 500.0, "leaves": 4.9}, True),
        ({"unexplained": 500.0, "leaves": 5.1}, False),
        ({"unexplained": 5000.0, "leaves": 10.1}, False),
        # Of ρ² - 1 = 8, nine tenths must be taken away: 1.34² - 1 is 0.796, 1.35² - 1 is 0.823.
        ({"unexplained": 3.0, "leaves": 1.34, "z": 0.0}, True),
        ({"unexplained": 3.0, "leaves": 1.35, "z": 0.0}, False),
        # Tokens may need a factor of their own on it as far as noise goes: 0.32 / ρ, and 0.02.
        ({"unevenness": 0.025}, True),
        ({"unevenness": 0.026}, False),
        ({"unevenness": 0.026, "unexplained": 12.0}, True),
        ({"unevenness": 0.5, "unexplained": 1.4}, True),
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

    def test_what_leaves_more_of_each_token_is_not_named_beside_the_best(self) -> None:
        best = score(misfit=2.0, misfits=torch.full((6,), 2.0))
        worse = score("b", misfit=2.1, misfits=torch.full((6,), 2.1))
        by_chance = score("c", misfit=2.1, misfits=torch.tensor([3.0, 1.0, 2.6, 2.0, 1.9, 2.1]))
        assert name_mistakes([worse, best, by_chance]) == (best, by_chance)

    def test_a_number_for_each_expert_is_no_better_than_one_for_all(self) -> None:
        simple, listed = score(misfit=1.05), score("b", parameters=({"factors": "0.95 " * 20},))
        assert name_mistakes([listed, simple]) == (simple,)
        assert name_mistakes([listed]) == (listed,)
        # A factor on a site that is as near speaks against it, though it does not explain the port.
        for misfit, named in ((1.1, ()), (1.11, (listed,))):
            factor = score("c", is_factor=True, misfit=misfit, leaves=3.0)
            assert name_mistakes([listed, factor]) == named


class TestDescriptions:
    """A factor on a site, which is no known mistake, competes with the mistakes."""

    FACTOR = score("post_norm scaled", is_named=False, is_factor=True, has_number=True)

    def test_a_factor_is_described_where_no_mistake_explains_the_port(self) -> None:
        assert (name_mistakes([self.FACTOR]), describe_port([self.FACTOR])) == ((), self.FACTOR)
        wrong = score("post_norm scaled", is_named=False, leaves=50.0)
        assert describe_port([wrong]) is None

    def test_a_mistake_with_a_number_is_no_name_where_a_factor_explains_the_port_as_well(self) -> None:
        epsilon = score("norm_eps", has_number=True, misfit=0.95)
        assert name_mistakes([epsilon, self.FACTOR]) == ()
        assert describe_port([epsilon, self.FACTOR]) is self.FACTOR
        better = score("norm_eps", has_number=True, misfit=0.9)
        assert name_mistakes([better, self.FACTOR]) == (better,)
        assert describe_port([better, self.FACTOR]) is None

    def test_a_mistake_that_is_a_factor_or_has_no_number_is_named_beside_it(self) -> None:
        scaled = score("moe_delta_scaled", is_factor=True, has_number=True)
        plain = score("gate_up_swapped")
        assert name_mistakes([scaled, plain, self.FACTOR]) == (scaled, plain)

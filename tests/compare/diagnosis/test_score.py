"""Scores of predictions: each figure by hand, on sites of a few tokens whose noise is 1.

Scores that explain a port, and those that only come near: each limit lets its own side through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.catalogue.mistake import Hypothesis
from compare.diagnosis.score import (
    Score,
    SitePrediction,
    best_first,
    describe_port,
    is_explanation,
    is_proof,
    name_mistakes,
    score_predictions,
)
from compare.noise.yardstick import Yardstick
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Change

HYPOTHESIS = Hypothesis(mistakes=(), parameters=(), change=Change())
NUM_TOKENS, NUM_CHANNELS = 8, 4
# Growth of a squared norm that adds 1 to the variance, BF16's relative noise being 0.006.
DOUBLING = NUM_CHANNELS / 6e-3**2


def rows(values: float | list[float]) -> torch.Tensor:
    """Spread one value for all tokens, or one for each, over all channels."""
    of_token = torch.tensor([values] * NUM_TOKENS if isinstance(values, float) else values)
    return of_token[:, None].expand(-1, NUM_CHANNELS).contiguous()


def score(
    sites: Mapping[Site, tuple[float | list[float], float | list[float]]],
    *,
    judged: int | None = None,
    growth: float = 0.0,
) -> Score:
    """Score predictions of some sites, whose right values are 0: the port's values and the predicted ones."""
    yardsticks, predictions = {}, {}
    for site, (port, prediction) in sites.items():
        values = rows(port)
        zero = torch.zeros_like(values)
        yardsticks[site] = Yardstick(
            port=values, golden=zero, exact=zero, variance=torch.ones_like(values), dtype=torch.bfloat16
        )
        predictions[site] = SitePrediction(rows=rows(prediction), growth=torch.full((len(values),), growth))
    num_tokens = len(values)
    return score_predictions(
        HYPOTHESIS,
        predictions,
        yardsticks=yardsticks,
        judged=torch.arange(num_tokens) < (num_tokens if judged is None else judged),
        is_decode_only=False,
    )


def test_cause_leaves_nothing() -> None:
    found = score({Site.OUTPUT: (2.0, 2.0)})
    assert (found.leaves, found.unexplained, found.misfit) == (0.0, 2.0, 0.0)
    assert (found.explains, found.amplitude, found.z, found.likeness) == (1.0, 1.0, math.inf, 1.0)
    assert found.is_decode_only is False


def test_worst_site_is_left_and_the_mean_is_the_misfit() -> None:
    found = score({Site.MOE_DELTA: (2.0, 1.0), Site.OUTPUT: (3.0, 0.0)})
    assert (found.leaves, found.unexplained, found.misfit) == (3.0, 3.0, (1.0 + 9.0) / 2)
    assert found.explains == pytest.approx(1.0 - (1.0 + 9.0) / (4.0 + 9.0))
    # Over both sites, e·p is 2 of each channel, p² is 1, and e² is 4 + 9.
    assert found.amplitude == pytest.approx(2.0)
    assert found.likeness == pytest.approx(2.0**2 / (1.0 * 13.0))


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_z_is_the_amplitude_over_its_spread_between_tokens(size: float) -> None:
    found = score({Site.OUTPUT: ([size, 3.0 * size] * 4, size)})
    assert found.amplitude == pytest.approx(2.0)
    assert found.likeness == pytest.approx(2.0**2 / 5.0)
    # Per token, e·p is 4 or 12 and p² is 4: they are off twice 4 by 4.
    assert found.z == pytest.approx(2.0 * (8 * 4) / math.sqrt(8 * 4**2))


def test_unevenness_is_how_far_tokens_lie_from_the_amplitude_beyond_noise() -> None:
    assert score({Site.OUTPUT: (20.0, 10.0)}).unevenness == 0.0
    # Per token, p² is 4 · 10², and e·p lies 4 · 10² from twice that: the rest is 400, of which 4 is noise.
    uneven = score({Site.OUTPUT: ([10.0, 30.0] * 4, 10.0)})
    assert uneven.amplitude == pytest.approx(2.0)
    assert uneven.unevenness == pytest.approx(math.sqrt((400.0 - 4.0) / 400.0))
    # Noise alone is even.
    assert score({Site.OUTPUT: ([0.0, 1.0] * 4, 0.5)}).unevenness == 0.0
    assert score({Site.OUTPUT: (2.0, 0.0)}).unevenness == 0.0


def test_tokens_that_the_golden_sent_elsewhere_are_not_uneven() -> None:
    port, golden = rows(10.0), rows([0.0, 40.0] * 4)
    yardstick = Yardstick(
        port=port,
        golden=golden,
        exact=torch.zeros_like(port),
        variance=torch.ones_like(port),
        dtype=torch.bfloat16,
    )
    found = score_predictions(
        HYPOTHESIS,
        {Site.OUTPUT: SitePrediction(rows=rows(10.0))},
        yardsticks={Site.OUTPUT: yardstick},
        judged=torch.ones(len(port), dtype=torch.bool),
        is_decode_only=False,
    )
    assert (found.leaves, found.unevenness) == (0.0, 0.0)
    assert found.amplitude == pytest.approx(-1.0)


def test_z_has_the_sign_of_the_amplitude() -> None:
    found = score({Site.OUTPUT: ([-1.0, -3.0] * 4, 1.0)})
    assert found.amplitude == pytest.approx(-2.0)
    assert found.z < 0.0


def test_few_tokens_that_weigh_tell_no_uncertainty() -> None:
    for num_weighing, is_known in ((3, False), (4, True)):
        predicted = [1.0] * num_weighing + [0.0] * (NUM_TOKENS - num_weighing)
        port = [1.0, 3.0] * (NUM_TOKENS // 2)
        found = score({Site.OUTPUT: (port, predicted)})
        assert found.amplitude == pytest.approx(sum(port[:num_weighing]) / num_weighing)
        assert (found.z > 0.0) is is_known


@pytest.mark.parametrize(
    ("num_tokens", "judged", "is_enough"), [(8, 5, False), (8, 6, True), (5, 5, True), (5, 4, False)]
)
def test_few_judged_tokens_prove_nothing(num_tokens: int, judged: int, is_enough: bool) -> None:
    found = score({Site.OUTPUT: ([2.0] * num_tokens, [1.0] * num_tokens)}, judged=judged)
    assert (found.leaves, found.misfit) == ((1.0, 1.0) if is_enough else (math.inf, math.inf))
    assert found.unexplained == 2.0


def test_tokens_that_do_not_count_are_not_looked_at() -> None:
    found = score({Site.OUTPUT: ([2.0] * 6 + [9.0, 9.0], [1.0] * 8)}, judged=6)
    assert (found.leaves, found.unexplained, found.amplitude) == (1.0, 2.0, 2.0)
    assert (found.z, found.likeness) == (math.inf, 1.0)


def test_values_that_are_not_finite_are_never_explained() -> None:
    found = score({Site.OUTPUT: ([math.nan, math.nan] + [2.0] * 6, 1.0)})
    assert (found.leaves, found.misfit, found.unexplained) == (math.inf, math.inf, math.inf)
    assert (found.explains, found.amplitude, found.z, found.likeness) == (0.0, 0.0, 0.0, 0.0)
    endless = score({Site.OUTPUT: (2.0, [math.inf, math.inf] + [1.0] * 6)})
    assert (endless.explains, endless.amplitude, endless.z, endless.likeness) == (0.0, 0.0, 0.0, 0.0)


def test_prediction_without_an_error_explains_none() -> None:
    found = score({Site.OUTPUT: (2.0, 0.0)})
    assert (found.explains, found.amplitude, found.z, found.likeness) == (0.0, 0.0, 0.0, 0.0)
    assert score({Site.OUTPUT: (0.0, 0.0)}).explains == 0.0


def test_error_that_is_added_is_less_than_none_explained() -> None:
    assert score({Site.OUTPUT: (1.0, 3.0)}).explains == pytest.approx(1.0 - 4.0)


def test_wider_noise_of_a_prediction_explains_nothing_by_itself() -> None:
    found = score({Site.OUTPUT: (2.0, 0.0)}, growth=DOUBLING)
    assert (found.unexplained, found.explains) == (2.0, 0.0)
    assert (found.leaves, found.misfit) == (pytest.approx(math.sqrt(2.0)), pytest.approx(2.0))
    assert score({Site.OUTPUT: (2.0, 1.0)}, growth=DOUBLING).leaves == pytest.approx(math.sqrt(0.5))


def test_prediction_of_decoded_tokens_alone_has_the_right_values_elsewhere() -> None:
    is_decoded = torch.tensor([False, True])
    prediction = SitePrediction(rows=torch.ones(2, 3), growth=torch.tensor([5.0, 6.0]))
    limited = prediction.limited_to(is_decoded, torch.zeros(2, 3))
    assert limited.rows.tolist() == [[0.0] * 3, [1.0] * 3]
    assert limited.growth.tolist() == [0.0, 6.0]
    assert SitePrediction(rows=torch.ones(2, 3)).growth.tolist() == [0.0]


def scored(name: str = "a", *, is_rounding: bool = False, **figures: Any) -> Score:
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
    assert is_explanation(scored(**figures)) is explains


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
    assert is_explanation(scored(is_rounding=True, **{"unexplained": 6.0, **figures})) is explains


def test_proof_is_of_a_clear_error_of_which_the_noise_is_left() -> None:
    assert is_proof(scored(unexplained=10.0, leaves=1.3))
    assert not is_proof(scored(unexplained=9.9, leaves=1.3))
    assert not is_proof(scored(unexplained=10.0, leaves=1.31))


def test_a_later_parameter_must_be_clearly_better() -> None:
    first, close, better = (scored(misfit=misfit) for misfit in (2.0, 1.97, 1.95))
    assert best_first([first, close]) == [first]
    assert best_first([first, better]) == [better]
    other = scored("b", misfit=1.0)
    assert best_first([first, other]) == [other, first]


class TestNames:
    def test_what_resembles_the_best_is_named_too(self) -> None:
        best, like, unlike = scored(misfit=2.0), scored("b", misfit=2.2), scored("c", misfit=2.21)
        assert name_mistakes([unlike, like, best]) == (best, like)

    def test_another_hypothesis_must_not_be_much_likelier(self) -> None:
        alike, unlike = scored(likeness=0.8), scored("b", likeness=0.79)
        better = scored("c", likeness=1.0, leaves=50.0)
        assert name_mistakes([alike, unlike, better]) == (alike,)
        by_chance = scored("c", likeness=1.0, leaves=50.0, z=0.0)
        assert name_mistakes([alike, unlike, by_chance]) == (alike,)

    def test_a_rounding_is_held_against_likenesses_that_are_proved(self) -> None:
        rounding = scored(is_rounding=True, unexplained=3.0, likeness=0.3)
        for z, named in ((7.9, (rounding,)), (8.0, ())):
            assert name_mistakes([rounding, scored("b", likeness=1.0, leaves=50.0, z=z)]) == named

    def test_a_large_rounding_needs_no_likeness_if_none_is_proved(self) -> None:
        rounding = scored(is_rounding=True, likeness=0.3, z=0.0)
        assert name_mistakes([rounding]) == (rounding,)

    def test_nothing_is_named_without_an_explanation(self) -> None:
        assert name_mistakes([]) == ()
        assert name_mistakes([scored(leaves=50.0)]) == ()

    def test_what_leaves_more_of_each_token_is_not_named_beside_the_best(self) -> None:
        best = scored(misfit=2.0, misfits=torch.full((6,), 2.0))
        worse = scored("b", misfit=2.1, misfits=torch.full((6,), 2.1))
        by_chance = scored("c", misfit=2.1, misfits=torch.tensor([3.0, 1.0, 2.6, 2.0, 1.9, 2.1]))
        assert name_mistakes([worse, best, by_chance]) == (best, by_chance)

    def test_a_number_for_each_expert_is_no_better_than_one_for_all(self) -> None:
        simple, listed = scored(misfit=1.05), scored("b", parameters=({"factors": "0.95 " * 20},))
        assert name_mistakes([listed, simple]) == (simple,)
        assert name_mistakes([listed]) == (listed,)
        # A factor on a site that is as near speaks against it, though it does not explain the port.
        for misfit, named in ((1.1, ()), (1.11, (listed,))):
            factor = scored("c", is_factor=True, misfit=misfit, leaves=3.0)
            assert name_mistakes([listed, factor]) == named


class TestDescriptions:
    """A factor on a site, which is no known mistake, competes with the mistakes."""

    FACTOR = scored("post_norm scaled", is_named=False, is_factor=True, has_number=True)

    def test_a_factor_is_described_where_no_mistake_explains_the_port(self) -> None:
        assert (name_mistakes([self.FACTOR]), describe_port([self.FACTOR])) == ((), self.FACTOR)
        wrong = scored("post_norm scaled", is_named=False, leaves=50.0)
        assert describe_port([wrong]) is None

    def test_a_mistake_with_a_number_is_no_name_where_a_factor_explains_the_port_as_well(self) -> None:
        epsilon = scored("norm_eps", has_number=True, misfit=0.95)
        assert name_mistakes([epsilon, self.FACTOR]) == ()
        assert describe_port([epsilon, self.FACTOR]) is self.FACTOR
        better = scored("norm_eps", has_number=True, misfit=0.9)
        assert name_mistakes([better, self.FACTOR]) == (better,)
        assert describe_port([better, self.FACTOR]) is None

    def test_a_mistake_that_is_a_factor_or_has_no_number_is_named_beside_it(self) -> None:
        scaled = scored("moe_delta_scaled", is_factor=True, has_number=True)
        plain = scored("gate_up_swapped")
        assert name_mistakes([scaled, plain, self.FACTOR]) == (scaled, plain)

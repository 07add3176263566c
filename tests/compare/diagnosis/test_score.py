"""Scores of predictions: each figure by hand, on sites of a few tokens whose noise is 1."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from compare.catalogue.mistake import Hypothesis
from compare.diagnosis.score import Score, SitePrediction, score_predictions
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

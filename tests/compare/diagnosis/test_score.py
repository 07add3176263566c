"""Scores of predictions: each figure by hand, on sites of a few tokens whose noise is 1.

Scores that explain a port, and those that only come near: each limit lets its own side through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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

Sites = Mapping[Site, tuple[float | list[float], float | list[float]]]


def rows(values: float | list[float]) -> torch.Tensor:
    """Spread one value for all tokens, or one for each, over all channels."""
    of_token = torch.tensor([values] * NUM_TOKENS if isinstance(values, float) else values)
    return of_token[:, None].expand(-1, NUM_CHANNELS).contiguous()


def score(
    sites: Sites, *, judged: int | None = None, growth: float = 0.0, golden: float | list[float] = 0.0
) -> Score:
    """Score predictions of some sites, whose right values are 0: the port's values and the predicted ones."""
    yardsticks, predictions = {}, {}
    for site, (port, prediction) in sites.items():
        values = rows(port)
        zero, one = torch.zeros_like(values), torch.ones_like(values)
        yardsticks[site] = Yardstick(
            port=values,
            golden=zero + rows(golden)[: len(values)],
            exact=zero,
            variance=one,
            dtype=torch.bfloat16,
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


def word_score(found: Score) -> str:
    """The figures, rounded; tokens that are alike but for last digits have any large z."""
    names = "leaves", "unexplained", "misfit", "explains", "amplitude", "likeness", "unevenness"
    figures = [f"{name} {getattr(found, name):.4f}" for name in names]
    return ", ".join([*figures, f"z {found.z:.3f}" if found.z < 1e6 else "z large"])


def test_figures_read_as_their_golden_text(expect_text: Callable[..., None]) -> None:
    output, spread = Site.OUTPUT, [1.0, 3.0] * 4
    both_sites: Sites = {Site.MOE_DELTA: (2.0, 1.0), output: (3.0, 0.0)}
    few_weigh = {number: [1.0] * number + [0.0] * (NUM_TOKENS - number) for number in (3, 4)}
    cases = {
        "the cause leaves nothing": score({output: (2.0, 2.0)}),
        # Over both sites, e·p is 2 of each channel, p² is 1, and e² is 4 + 9.
        "the worst site is left, and the mean is the misfit": score(both_sites),
        # Per token, e·p is 4 or 12 and p² is 4: they are off twice 4 by 4. So z is 2 · (8 · 4) / √(8 · 4²).
        "z is the amplitude over its spread between tokens": score({output: (spread, 1.0)}),
        "of any size": score({output: ([1e-3, 3e-3] * 4, 1e-3)}),
        "z has the sign of the amplitude": score({output: ([-1.0, -3.0] * 4, 1.0)}),
        # Per token, p² is 4 · 10², and e·p lies 4 · 10² from twice that: the rest is 400, of which 4 is noise.
        "unevenness is how far tokens lie from the amplitude": score({output: ([10.0, 30.0] * 4, 10.0)}),
        "tokens that are even": score({output: (20.0, 10.0)}),
        "noise alone is even": score({output: ([0.0, 1.0] * 4, 0.5)}),
        "tokens that the golden sent elsewhere are": score({output: (10.0, 10.0)}, golden=[0.0, 40.0] * 4),
        **{
            f"{number} tokens that weigh": score({output: (spread, predicted)})
            for number, predicted in few_weigh.items()
        },
        # Fewer than six tokens, or three quarters of them, are too few.
        **{
            f"{judged} of {number} tokens count": score(
                {output: ([2.0] * number, [1.0] * number)}, judged=judged
            )
            for number, judged in ((8, 5), (8, 6), (5, 5), (5, 4))
        },
        "others are not looked at": score({output: ([2.0] * 6 + [9.0, 9.0], [1.0] * 8)}, judged=6),
        "the port is not finite": score({output: ([math.nan, math.nan] + [2.0] * 6, 1.0)}),
        "the prediction is not finite": score({output: (2.0, [math.inf, math.inf] + [1.0] * 6)}),
        "no error is predicted": score({output: (2.0, 0.0)}),
        "there is no error": score({output: (0.0, 0.0)}),
        "an error is added": score({output: (1.0, 3.0)}),
        # Wider noise of a prediction explains nothing by itself: the variance is 2.
        "the noise grows": score({output: (2.0, 0.0)}, growth=DOUBLING),
        "the noise grows, and some is explained": score({output: (2.0, 1.0)}, growth=DOUBLING),
    }
    expect_text("scores.txt", {title: word_score(found) for title, found in cases.items()})


def test_prediction_of_decoded_tokens_alone_has_the_right_values_elsewhere() -> None:
    is_decoded = torch.tensor([False, True])
    prediction = SitePrediction(rows=torch.ones(2, 3), growth=torch.tensor([5.0, 6.0]))
    limited = prediction.limited_to(is_decoded, torch.zeros(2, 3))
    assert limited.rows.tolist() == [[0.0] * 3, [1.0] * 3]
    assert limited.growth.tolist() == [0.0, 6.0]
    assert SitePrediction(rows=torch.ones(2, 3)).growth.tolist() == [0.0]


def scored(name: str = "a", *, is_rounding: bool = False, **figures: Any) -> Score:
    usual = {"is_named": True, "parameters": ()}
    usual |= dict.fromkeys(("is_factor", "has_number", "is_fitted", "has_list"), False)
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


FAINT = {"unexplained": 1.4}
ROUNDING = {"is_rounding": True, "unexplained": 6.0}


@pytest.mark.parametrize(
    ("figures", "limited", "inside", "outside"),
    [
        ({}, "leaves", 2.0, 2.01),
        ({}, "explains", 0.81, 0.0),
        # A number that was fitted to the port also fits what is only close.
        ({"is_fitted": True}, "leaves", 1.5, 1.51),
        ({"is_fitted": True, "unexplained": 500.0}, "leaves", 4.9, 5.1),
        ({"has_list": True, "leaves": 1.0, "explains": 0.9, "z": 50.0}, "unexplained", 1.5, 1.49),
        # Of a ρ above 200, a hundredth may be left, at most 10.
        ({"unexplained": 500.0}, "leaves", 4.9, 5.1),
        ({"unexplained": 5000.0}, "leaves", 9.9, 10.1),
        # Of ρ² - 1 = 8, nine tenths must be taken away: 1.34² - 1 is 0.796, 1.35² - 1 is 0.823.
        ({"unexplained": 3.0, "z": 0.0}, "leaves", 1.34, 1.35),
        # Tokens may need a factor of their own on it as far as noise goes: 0.32 / ρ, and 0.02.
        ({}, "unevenness", 0.025, 0.026),
        ({"unevenness": 0.026}, "unexplained", 12.0, 20.0),
        ({"unevenness": 0.5}, "unexplained", 1.4, 1.6),
        # A faint error needs z, an amplitude near 1 and a share of the energy.
        ({**FAINT, "explains": 0.02}, "z", 8.0, 7.9),
        ({**FAINT, "z": 8.0}, "explains", 0.02, 0.019),
        (FAINT, "amplitude", 1.29, 1.31),
        (FAINT, "amplitude", 0.71, 0.69),
        ({**ROUNDING, "leaves": 3.0, "z": 8.0}, "explains", 0.2, 0.19),
        ({**ROUNDING, "leaves": 3.0, "explains": 0.2}, "z", 8.0, 7.9),
        ({**ROUNDING, "leaves": 3.0}, "amplitude", 1.49, 1.51),
        ({**ROUNDING, "leaves": 3.0}, "amplitude", 0.51, 0.49),
        ({**ROUNDING, **FAINT}, "explains", 0.02, 0.019),
        # Above the noise, a rounding must leave as little as any other mistake.
        ({**ROUNDING, "leaves": 3.0}, "unexplained", 6.0, 6.1),
    ],
)
def test_limits_of_what_explains_a_port(
    figures: dict[str, Any], limited: str, inside: float, outside: float
) -> None:
    assert is_explanation(scored(**{**figures, limited: inside}))
    assert not is_explanation(scored(**{**figures, limited: outside}))


def test_proof_is_of_a_clear_error_of_which_the_noise_is_left() -> None:
    assert is_proof(scored(unexplained=10.0, leaves=1.3))
    assert not is_proof(scored(unexplained=9.9, leaves=1.3))
    assert not is_proof(scored(unexplained=10.0, leaves=1.31))


def word_names(*scores: Score) -> str:
    """Return the names, the best first, and the factor that describes the port."""
    described = describe_port(scores)
    words = "nothing" if described is None else described.hypothesis.name
    order = ", ".join(f"{score.hypothesis.name} {score.misfit:g}" for score in best_first(scores))
    return (
        f"named {[score.hypothesis.name for score in name_mistakes(scores)]}, described {words}, of {order}"
    )


def test_names_read_as_their_golden_text(expect_text: Callable[..., None]) -> None:
    best, likely = scored(misfit=2.0), scored("c", likeness=1.0, leaves=50.0)
    rounding = scored(is_rounding=True, unexplained=3.0, likeness=0.3)
    misfits = torch.full((6,), 2.0)
    by_chance = scored("c", misfit=2.1, misfits=torch.tensor([3.0, 1.0, 2.6, 2.0, 1.9, 2.1]))
    worse = scored("b", misfit=2.1, misfits=misfits + 0.1)
    listed = scored("b", parameters=({"factors": "0.95 " * 20},))
    # A factor on a site, which is no known mistake, competes with the mistakes.
    factor = scored("post_norm scaled", is_named=False, is_factor=True, has_number=True)
    epsilon = {misfit: scored("norm_eps", has_number=True, misfit=misfit) for misfit in (0.9, 0.95)}
    cases = {
        **{
            f"a later parameter of misfit {misfit} must be clearly better": word_names(
                best, scored(misfit=misfit)
            )
            for misfit in (1.97, 1.95)
        },
        "another mistake is better": word_names(best, scored("b", misfit=1.0)),
        "what resembles the best is named too": word_names(
            scored("c", misfit=2.21), scored("b", misfit=2.2), best
        ),
        "another must not be much likelier": word_names(
            scored(likeness=0.8), scored("b", likeness=0.79), likely
        ),
        "be it by chance": word_names(
            scored(likeness=0.8), scored("b", likeness=0.79), scored("c", likeness=1.0, leaves=50.0, z=0.0)
        ),
        **{
            f"a rounding beside a likeness of z {z}": word_names(
                rounding, scored("b", likeness=1.0, leaves=50.0, z=z)
            )
            for z in (7.9, 8.0)
        },
        "a large rounding where none is proved": word_names(scored(is_rounding=True, likeness=0.3, z=0.0)),
        "without an explanation": word_names(scored(leaves=50.0)),
        "without a mistake": word_names(),
        "what leaves more of each token": word_names(worse, scored(misfit=2.0, misfits=misfits), by_chance),
        # A number for each expert is no better than one for all.
        "a list beside one number": word_names(listed, scored(misfit=1.05)),
        "a list": word_names(listed),
        # A factor on a site that is as near speaks against it, though it does not explain the port.
        **{
            f"a list beside a factor of misfit {misfit}": word_names(
                listed, scored("c", is_factor=True, misfit=misfit, leaves=3.0)
            )
            for misfit in (1.1, 1.11)
        },
        "a factor where no mistake explains the port": word_names(factor),
        "a factor that does not": word_names(scored("post_norm scaled", is_named=False, leaves=50.0)),
        **{
            f"a mistake with a number, of misfit {misfit}, beside a factor": word_names(one, factor)
            for misfit, one in epsilon.items()
        },
        "a mistake that is a factor, or has no number, beside it": word_names(
            scored("moe_delta_scaled", is_factor=True, has_number=True), scored("gate_up_swapped"), factor
        ),
    }
    expect_text("names.txt", cases)

from __future__ import annotations

import math

import pytest

from compare.limits.limits import Limit, most_hits, quantile


def test_limit_grows_with_fewer_tokens_and_smaller_shares() -> None:
    limit = Limit(usual=1.1, spread=0.02, token_spread=0.1)
    assert limit.at(num_tokens=100, share=1e-3) == pytest.approx(1.1 * math.exp(3.0902 * 0.03), rel=1e-4)
    assert limit.at(num_tokens=1, share=1e-3) == pytest.approx(1.1 * math.exp(3.0902 * 0.12), rel=1e-4)
    assert limit.at(num_tokens=0, share=1e-3) == limit.at(num_tokens=1, share=1e-3)
    assert limit.at(num_tokens=4, share=1e-3) > limit.at(num_tokens=100, share=1e-3)
    assert limit.at(num_tokens=100, share=1e-7) > limit.at(num_tokens=100, share=1e-3)
    # A number alone is the limit of all cases.
    alone = Limit(usual=1.5)
    assert alone.at(num_tokens=1, share=1e-9) == alone.at(num_tokens=1000, share=0.4) == 1.5


@pytest.mark.parametrize("values", [{"usual": 0.0}, {"usual": math.inf}, {"usual": 1.0, "spread": -0.1}])
def test_limit_that_cannot_be_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="found"):
        Limit(**values)


def test_quantile_is_the_normal_distributions() -> None:
    assert quantile(0.025) == pytest.approx(1.95996, rel=1e-5)
    assert quantile(0.9) == 0.0
    assert math.isfinite(quantile(0.0))


@pytest.mark.parametrize(("num_trials", "chance"), [(7, 0.05), (164, 0.05), (500, 0.02), (50, 0.5)])
def test_hits_are_exceeded_in_less_than_the_share_of_cases(num_trials: int, chance: float) -> None:
    share = 1e-4

    def exceeded(hits: int) -> float:
        return sum(
            math.comb(num_trials, count) * chance**count * (1.0 - chance) ** (num_trials - count)
            for count in range(hits + 1, min(num_trials, hits + 400) + 1)
        )

    most = most_hits(num_trials, chance=chance, share=share)
    assert exceeded(most) <= share < exceeded(most - 1)


def test_hits_that_are_sure_or_impossible() -> None:
    assert most_hits(9, chance=1.0, share=0.1) == 9
    assert most_hits(9, chance=0.0, share=0.1) == 0
    assert most_hits(0, chance=0.3, share=0.1) == 0

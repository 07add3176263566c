from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from compare.limits.limits import (
    STRUCTURE_FIGURES,
    Limit,
    LimitContext,
    NoiseLimits,
    SiteLimits,
    backend_of,
    computes_in_float32,
    most_hits,
    quantile,
)
from minimax_tools.errors import UsageError


def description(**changes: Any) -> Any:
    provenance = SimpleNamespace(dtypes=changes.pop("dtypes", {}), backend=changes.pop("backend", "cpu"))
    return SimpleNamespace(known_description=SimpleNamespace(provenance=provenance))


def table(usual: float, *figures: str) -> SiteLimits:
    return SiteLimits.of({"all": {figure: Limit(usual=usual) for figure in (*figures, "whole")}})


OWN = NoiseLimits(
    level=0.01,
    isolated=table(1.0, "token_gain"),
    chained=table(2.0),
    isolated_estimated=table(3.0),
    chained_estimated=table(4.0),
    without_floor=table(7.0),
    float32=1e-5,
    backends=frozenset({"cpu"}),
    slack=1.5,
    isolated_variants=table(5.0, "channel_worst"),
    isolated_variants_estimated=table(6.0),
)


@pytest.mark.parametrize(
    ("is_chained", "is_estimated", "is_widened", "expected"),
    [
        (False, False, False, 1.0),
        (True, False, False, 2.0),
        (True, False, True, 2.0),
        (False, True, False, 3.0),
        (True, True, False, 4.0),
        (True, True, True, 4.0),
        (False, False, True, 5.0),
        (False, True, True, 6.0),
    ],
)
def test_each_kind_has_its_table(
    is_chained: bool, is_estimated: bool, is_widened: bool, expected: float
) -> None:
    found = OWN.of_ratios(is_chained=is_chained, is_estimated=is_estimated, is_widened=is_widened)
    assert found.find("output", "whole") == Limit(usual=expected)


def test_without_tables_of_their_own_variants_have_those_of_others() -> None:
    bare = replace(OWN, isolated_variants=None, isolated_variants_estimated=None)
    for is_estimated, expected in ((False, bare.isolated), (True, bare.isolated_estimated)):
        assert bare.of_ratios(is_chained=False, is_estimated=is_estimated, is_widened=True) is expected


def test_share_is_the_level_divided_among_the_figures() -> None:
    assert [OWN.share(number) for number in (0, 1, 2, 100)] == [0.01, 0.01, 0.005, 0.0001]


def test_limits_are_measured_on_the_backends_that_they_name() -> None:
    assert [OWN.is_measured_on(backend) for backend in ("cpu", "neuron-xla", None)] == [True, False, False]
    assert replace(OWN, backends=None).is_measured_on(None)


def test_limits_of_noise_alone_have_no_averages_and_hold_everywhere() -> None:
    alone = OWN.of_noise_alone()
    assert alone.backends is None
    for limits in (alone.isolated, alone.isolated_variants):
        assert limits is not None
        assert all(limits.find("output", figure) is None for figure in STRUCTURE_FIGURES)
        assert limits.find("output", "whole") is not None
    assert replace(OWN, isolated_variants=None).of_noise_alone().isolated_variants is None


def test_limit_that_a_file_left_out_is_named() -> None:
    with pytest.raises(UsageError, match=r"no limit on flipped_share of output .*without_floor\.all"):
        OWN.floorless("output", "flipped_share")


def test_context_is_what_a_capture_says() -> None:
    silent: Any = SimpleNamespace(known_description=None)
    assert not computes_in_float32(silent)
    assert backend_of(silent) is None
    assert computes_in_float32(description(dtypes={"weights": "float32"}))
    assert not computes_in_float32(description(dtypes={"weights": "bfloat16"}))
    assert not computes_in_float32(description())
    assert backend_of(description(backend="neuron-xla")) == "neuron-xla"
    assert not LimitContext(backend=None, is_float32=False, share=0.1).hides_flips


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

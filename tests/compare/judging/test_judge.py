"""The values of one site, judged on small tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from compare.judging.judge import floorless_limit, judge_values
from compare.judging.routing import count_unflipped
from compare.limits.criteria import OUTPUTS_ALONE, Criteria
from compare.limits.limits import LimitContext
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.noise.rho import noise_ratio
from compare.noise.rows import InputError, Rows
from minimax_tools.errors import IncomparableError
from minimax_tools.results.results import RelativeError, SiteResult, SiteStatus

TOKENS, CHANNELS = 40, 64
CRITERIA = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
CONTEXT = LimitContext(backend="cpu", is_float32=False, share=1e-6)
HIDES = replace(CONTEXT, hides_flips=True)
RESULT = SiteResult(layer=3, site="output", status=SiteStatus.FAIL)
EXACT = torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0))
GOLDEN = EXACT.bfloat16()
PLACES = torch.stack((torch.arange(TOKENS) // 10, torch.arange(TOKENS) % 10), dim=1)


def rows(port: torch.Tensor = GOLDEN, **changes: Any) -> Rows:
    massive = torch.zeros(CHANNELS, dtype=torch.bool)
    return replace(Rows(reference=GOLDEN, target=port, massive=massive, places=PLACES, twin=EXACT), **changes)


def with_value(value: float, token: int, channel: int) -> torch.Tensor:
    changed = GOLDEN.clone()
    changed[token, channel] = value
    return changed


def judge(site_rows: Rows, *, result: SiteResult = RESULT, **options: Any) -> SiteResult:
    return judge_values(result, site_rows, **{"criteria": CRITERIA, "context": CONTEXT, **options})


def first(number: int) -> torch.Tensor:
    return torch.arange(TOKENS) < number


def test_right_values_pass_with_their_figures() -> None:
    found = judge(rows())
    assert (found.status, found.reason, found.num_judged, found.num_set_aside) == (SiteStatus.PASS, "", 40, 0)
    assert found.noise == noise_ratio(rows())
    assert found.nearest is not None
    assert found.metrics is not None
    assert found.relative is None


def test_worst_element_is_told_by_row_position_and_channel() -> None:
    found = judge(rows(with_value(50.0, 23, 7)))
    assert found.status is SiteStatus.FAIL
    assert found.metrics is not None
    assert found.metrics.worst_index == (2, 3, 7)


@pytest.mark.parametrize(
    ("result", "place"),
    [(RESULT, "output of layer 3"), (replace(RESULT, layer=None, site="logits"), "logits")],
)
def test_golden_that_is_no_number_is_refused(result: SiteResult, place: str) -> None:
    with pytest.raises(IncomparableError, match=f"the golden's {place} holds 1 NaN or Inf on real tokens"):
        judge(rows(reference=with_value(math.nan, 4, 4)), result=result)


def test_port_that_is_no_number_fails_at_its_first() -> None:
    port = with_value(math.inf, 23, 7)
    port[31, :2] = math.nan
    found = judge(rows(port))
    assert found.status is SiteStatus.FAIL
    assert found.reason == "3 NaN or Inf on real tokens, the first at row 2, token 3"
    assert found.noise is None
    classic = judge(rows(port), criteria=replace(CRITERIA, name="classic"))
    assert (classic.status, classic.reason) == (SiteStatus.FAIL, found.reason)


def test_classic_limits_judge_outputs_alone() -> None:
    classic = replace(CRITERIA, name="classic")
    assert judge(rows(), criteria=classic).status is SiteStatus.PASS
    wrong = judge(rows(2 * GOLDEN), criteria=classic)
    assert (wrong.status, wrong.reason) == (SiteStatus.FAIL, "; ".join(wrong.classic_failures))
    other = judge(rows(), criteria=classic, result=replace(RESULT, site="moe_delta"))
    assert (other.status, other.reason) == (SiteStatus.NOT_JUDGED, OUTPUTS_ALONE)


def test_input_that_is_no_number_is_told() -> None:
    for error, status in ((math.nan, SiteStatus.FAIL), (math.inf, SiteStatus.FAIL), (0.1, SiteStatus.PASS)):
        handed_on = InputError(overall=error, tokens=torch.full((TOKENS,), error))
        found = judge(rows(input_error=handed_on))
        assert found.status is status
        told = found.reason == "the layer's input already held NaN or Inf"
        assert told is (status is SiteStatus.FAIL)


def test_tokens_set_aside_are_not_judged() -> None:
    wrong = GOLDEN.clone()
    wrong[:5] = 9.0
    assert judge(rows(wrong)).status is SiteStatus.FAIL
    found = judge(rows(wrong), set_aside=first(5))
    assert (found.status, found.num_judged, found.num_set_aside) == (SiteStatus.PASS, 35, 5)
    # The figures of all tokens stay.
    assert found.metrics == judge(rows(wrong)).metrics
    assert judge(rows(wrong), set_aside=first(4)).status is SiteStatus.FAIL
    assert judge(rows(wrong), set_aside=first(0)).num_judged == 40


def test_no_token_left_is_no_judgement() -> None:
    found = judge(rows(), set_aside=first(TOKENS))
    assert (found.status, found.num_set_aside) == (SiteStatus.NOT_JUDGED, 40)
    assert found.num_judged == RESULT.num_judged
    assert "no token is left" in found.reason
    one = judge(rows(), set_aside=first(TOKENS - 1))
    assert (one.status, one.num_judged) == (SiteStatus.PASS, 1)


def test_replayed_values_are_judged_in_place_of_the_goldens() -> None:
    port = 3.0 * EXACT
    replayed = replace(rows(port.bfloat16()), reference=port.bfloat16(), twin=port)
    found = judge(rows(port.bfloat16()), replayed=replayed)
    assert found.status is SiteStatus.PASS
    assert found.metrics == judge(rows(port.bfloat16())).metrics
    assert found.noise == noise_ratio(replayed)


class TestDtype:
    def test_finer_one_is_noted(self) -> None:
        for one in (rows(GOLDEN.float()), rows(GOLDEN.float(), twin=None)):
            found = judge(one)
            assert found.status is SiteStatus.PASS
            assert found.reason == "shown in float32, where the golden holds bfloat16"

    def test_one_that_cannot_hold_the_goldens_values_warns(self) -> None:
        for golden, port in ((torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)):
            found = judge(rows(GOLDEN.to(port), stored_dtype=golden))
            reason = f"dtype: expected {golden}, found {port}"
            assert (found.status, found.reason) == (SiteStatus.WARN, reason)


class TestWithoutFloor:
    def test_relative_error_is_judged(self) -> None:
        found = judge(rows(1.5 * GOLDEN, twin=None))
        assert found.status is SiteStatus.FAIL
        assert found.relative is not None
        assert found.relative.value == pytest.approx(0.5, rel=1e-2)
        assert (found.relative.incoming, found.noise) == (0.0, None)
        assert found.nearest is not None
        limit = floorless_limit(0.0, CRITERIA.noise, site="output", num_tokens=40, context=CONTEXT)
        assert (found.nearest.figure, found.nearest.limit) == ("relative_l2", limit)
        assert judge(rows(twin=None)).relative == RelativeError(value=0.0, incoming=0.0)

    def test_error_is_that_of_the_judged_tokens(self) -> None:
        wrong = GOLDEN.clone()
        wrong[:5] = 9.0
        found = judge(rows(wrong, twin=None), set_aside=first(5))
        assert (found.status, found.relative) == (SiteStatus.PASS, RelativeError(value=0.0, incoming=0.0))

    def test_inherited_error_widens_its_limit(self) -> None:
        handed_on = InputError(overall=0.25, tokens=torch.full((TOKENS,), 0.25))
        found = judge(rows(1.2 * GOLDEN, twin=None, input_error=handed_on))
        assert found.status is SiteStatus.PASS
        assert found.relative is not None
        assert found.relative.incoming == 0.25

    def test_hidden_flips_are_the_tokens_furthest_off(self) -> None:
        kept = count_unflipped(TOKENS, CRITERIA.noise, input_error=0.0, context=HIDES)
        assert 0 < kept < TOKENS
        # Large values that are a little off, and small ones that are far off: relative errors count.
        is_far = first(TOKENS - kept)[:, None]
        reference = torch.where(is_far, 0.01 * GOLDEN, 100.0 * GOLDEN).bfloat16()
        port = torch.where(is_far, -reference, 1.004 * reference).bfloat16()
        wrong = rows(port, reference=reference, twin=None)
        found = judge(wrong, context=HIDES)
        assert (found.num_judged, found.num_set_aside) == (kept, TOKENS - kept)
        assert found.relative is not None
        assert found.relative.value < 0.01
        assert judge(wrong).num_judged == TOKENS
        # One token more that is off shows.
        port[TOKENS - kept] = 0.1 * reference[TOKENS - kept]
        assert judge(rows(port, reference=reference, twin=None), context=HIDES).status is SiteStatus.FAIL

    def test_inherited_errors_hide_more(self) -> None:
        handed_on = InputError(overall=0.05, tokens=torch.full((TOKENS,), 0.05))
        found = judge(rows(twin=None, input_error=handed_on), context=HIDES)
        kept = count_unflipped(TOKENS, CRITERIA.noise, input_error=0.05, context=HIDES)
        assert found.num_judged == kept < judge(rows(twin=None), context=HIDES).num_judged

    def test_with_a_floor_no_flip_is_guessed(self) -> None:
        assert judge(rows(), context=HIDES).num_judged == TOKENS

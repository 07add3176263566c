from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compare.judging.logits import TokenLimits, compare_logits, judge_logits
from compare.limits.criteria import Judgement
from compare.limits.limit_context import LimitContext
from compare.limits.limits_file import calibrated_limits
from compare.noise.rows import Rows
from minimax_tools.model.run import full_run
from minimax_tools.model.sites import ModelSite
from minimax_tools.results.choices import LogitsResult
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus

Judge = Callable[..., Comparison]

NUM_LAYERS = 4
TOKENS, WORDS = 300, 2_000
SIGMA = 0.02
USUAL_ERROR = 0.03


def exact_logits() -> torch.Tensor:
    return 2.0 * torch.randn(TOKENS, WORDS, generator=torch.Generator().manual_seed(0))


def noise(seed: int, size: float = SIGMA) -> torch.Tensor:
    return size * torch.randn(TOKENS, WORDS, generator=torch.Generator().manual_seed(seed))


def compare(target: torch.Tensor, *, exact: torch.Tensor | None = None, floor: bool = True) -> LogitsResult:
    """`target` against a golden with noise of its own."""
    exact = exact_logits() if exact is None else exact
    return compare_logits(
        Rows(
            reference=exact + noise(1),
            target=target,
            massive=torch.zeros(WORDS, dtype=torch.bool),
            places=torch.stack((torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS)), dim=-1),
            twin=exact if floor else None,
        ),
        usual_error=USUAL_ERROR,
    )


def judged(result: LogitsResult, *, backend: str | None = "cpu") -> Judgement:
    context = LimitContext(backend=backend, is_float32=False, share=1e-3)
    return judge_logits(result, TokenLimits(), noise=calibrated_limits(), context=context)


def test_golden_itself_diverges_by_nothing() -> None:
    result = compare(exact_logits() + noise(1))
    assert (result.kl_mean, result.kl_p95, result.num_disagreeing) == (0.0, 0.0, 0)
    assert result.overlaps == {1: 1.0, 5: 1.0, 10: 1.0}


def test_divergence_is_that_of_torch() -> None:
    mine, theirs = exact_logits() + noise(1), exact_logits() + noise(2, 0.5)
    expected = torch.nn.functional.kl_div(
        theirs.double().log_softmax(-1), mine.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    result = compare(theirs)
    assert result.kl_mean == pytest.approx(float(expected.mean()), rel=1e-9)
    assert result.kl_p95 == pytest.approx(float(torch.quantile(expected, 0.95)), rel=1e-9)
    assert result.worst_token == (0, int(expected.argmax()))


def test_noise_like_the_goldens_comes_to_what_is_foreseen_and_passes() -> None:
    result = compare(exact_logits() + noise(2))
    assert result.kl_mean_foreseen == pytest.approx(SIGMA**2, rel=0.05)
    assert 0.7 * SIGMA**2 < result.kl_mean < 1.1 * SIGMA**2
    assert 0 < result.num_disagreeing == result.num_explained
    assert judged(result) == (SiteStatus.PASS, "")


def test_larger_noise_diverges_beyond_its_limit() -> None:
    status, reason = judged(compare(exact_logits() + noise(2, 4 * SIGMA)))
    assert status is SiteStatus.FAIL
    assert "mean of the divergence is " in reason


@pytest.mark.parametrize("backend", ["neuron-xla", None])
def test_divergence_a_little_beyond_its_limit_warns_on_a_backend_that_was_not_measured(
    backend: str | None,
) -> None:
    found = compare(exact_logits() + noise(2, 3 * SIGMA))
    assert 4.0 < found.kl_mean / found.kl_mean_foreseen < 9.0
    assert judged(found)[0] is SiteStatus.FAIL
    status, reason = judged(found, backend=backend)
    assert status is SiteStatus.WARN
    assert ("not measured on neuron-xla" if backend else "its backend is not known") in reason


def test_divergence_far_beyond_its_limit_fails_everywhere() -> None:
    found = compare(exact_logits() + noise(2, 6 * SIGMA))
    assert judged(found, backend="neuron-xla")[0] is SiteStatus.FAIL


def test_one_token_chosen_otherwise_beyond_noise_is_named() -> None:
    exact = exact_logits()
    exact[7, :2] = torch.tensor([20.0, 19.0])
    target = exact + noise(2)
    target[7, 1] = 20.5
    result = compare(target, exact=exact)
    assert judged(result, backend="neuron-xla")[0] is SiteStatus.FAIL
    status, reason = judged(result)
    assert status is SiteStatus.FAIL
    assert reason.startswith(
        f"1 of {TOKENS} likeliest tokens are others beyond noise, the worst at row 0, token 7"
    )


def test_near_tie_is_explained_and_a_wide_margin_is_not() -> None:
    exact = exact_logits()
    target = exact + noise(2)
    for token, margin in ((3, 0.5 * SIGMA), (4, 30 * SIGMA)):
        exact[token, :2] = torch.tensor([20.0, 20.0 - margin])
        target[token, :2] = torch.tensor([20.0 - margin, 20.0])
    result = compare(target, exact=exact)
    assert result.num_disagreeing - result.num_explained == 1
    (worst,) = result.worst_choices
    assert (worst.position, worst.reference, worst.target) == (4, 0, 1)


def test_margin_of_tied_choices_is_that_of_the_token_that_is_chosen() -> None:
    exact = exact_logits()
    target = exact + noise(2)
    # The port's two likeliest tokens tie; a greedy choice takes the first, which is far below the golden's own.
    for token in range(64):
        exact[token, 0], exact[token, 1_500 + token] = -5.0, 20.0
        target[token, 0] = target[token, 1_500 + token] = 20.0
    result = compare(target, exact=exact)
    assert (result.num_disagreeing - result.num_explained, result.overlaps[1]) == (
        64,
        pytest.approx(236 / 300, abs=0.05),
    )
    assert all(choice.target == 0 and choice.margin > 20.0 for choice in result.worst_choices)


def test_without_a_floor_the_usual_error_stands_in_for_it() -> None:
    result = compare(exact_logits() + noise(2), floor=False)
    assert result.kl_mean_foreseen == pytest.approx((USUAL_ERROR * 2.0) ** 2, rel=0.05)
    assert judged(result)[0] is SiteStatus.PASS
    assert judged(compare(exact_logits() + noise(2, 1.0), floor=False))[0] is SiteStatus.FAIL


def logits_of(comparison: Comparison) -> SiteResult:
    (found,) = [one for one in comparison.of_layer(None) if one.site == ModelSite.LOGITS]
    return found


def test_comparison_reports_them(copyist: Any, judge: Judge) -> None:
    run = full_run(NUM_LAYERS, sites_level="all")
    result = logits_of(judge(copyist.device_run(run=run)))
    assert result.status is SiteStatus.PASS
    assert result.logits is not None
    assert (result.logits.num_tokens, result.logits.kl_mean, result.logits.overlaps[1]) == (81, 0.0, 1.0)


def test_another_likeliest_token_is_told_with_its_place(copyist: Any, judge: Judge) -> None:
    gaps = copyist.source.read_model(ModelSite.LOGITS)[0].float().topk(2).values
    position = int((gaps[:, 0] - gaps[:, 1]).argmax())

    def swap(logits: torch.Tensor) -> torch.Tensor:
        first, second = logits[0, position].topk(2).indices.tolist()
        logits[0, position, second] = logits[0, position, first] + 0.5
        return logits

    run = full_run(NUM_LAYERS, sites_level="layer")
    comparison = judge(copyist.device_run({(None, ModelSite.LOGITS): swap}, run=run))
    result = logits_of(comparison)
    assert result.status is SiteStatus.FAIL
    assert result.logits is not None
    assert (result.logits.num_unexplained, result.logits.worst_choices[0].position) == (1, position)
    assert "1 of 81 likeliest tokens are others beyond noise" in result.reason

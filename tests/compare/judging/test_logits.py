from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from compare.judging.logits import (
    compare_logits,
    divergence_limit,
    divergences,
    foreseen_divergence,
    judge_logits,
    logit_noise,
)
from compare.limits.criteria import Judgement
from compare.limits.limits import LimitContext
from compare.limits.limits_file import calibrated_limits
from compare.noise.rows import InputError, Rows, Squares
from minimax_tools.results.results import LogitsResult, SiteStatus, TokenChoice

TOKENS, WORDS = 300, 2_000
SIGMA = 0.02
USUAL_ERROR = 0.03


def exact_logits() -> torch.Tensor:
    return 2.0 * torch.randn(TOKENS, WORDS, generator=torch.Generator().manual_seed(0))


def noise(seed: int, size: float = SIGMA) -> torch.Tensor:
    return size * torch.randn(TOKENS, WORDS, generator=torch.Generator().manual_seed(seed))


def compare(target: torch.Tensor, *, exact: torch.Tensor | None = None) -> LogitsResult:
    """`target` against a golden with noise of its own."""
    exact = exact_logits() if exact is None else exact
    return compare_logits(
        Rows(
            reference=exact + noise(1),
            target=target,
            massive=torch.zeros(WORDS, dtype=torch.bool),
            places=torch.stack((torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS)), dim=-1),
            twin=exact,
        ),
        usual_error=USUAL_ERROR,
    )


def judged(result: LogitsResult, *, backend: str | None = "cpu") -> Judgement:
    context = LimitContext(backend=backend, is_float32=False, share=1e-3)
    return judge_logits(result, noise=calibrated_limits(), context=context)


def test_golden_itself_diverges_by_nothing() -> None:
    result = compare(exact_logits() + noise(1))
    assert (result.kl_mean, result.kl_p95, result.num_disagreeing) == (0.0, 0.0, 0)
    assert result.overlaps == {1: 1.0, 5: 1.0, 10: 1.0}


def test_noise_like_the_goldens_comes_to_what_is_foreseen_and_passes() -> None:
    result = compare(exact_logits() + noise(2))
    assert result.kl_mean_foreseen == pytest.approx(SIGMA**2, rel=0.05)
    assert 0.7 * SIGMA**2 < result.kl_mean < 1.1 * SIGMA**2
    assert 0 < result.num_disagreeing == result.num_explained
    assert judged(result) == (SiteStatus.PASS, "")


def test_margin_of_tied_choices_is_that_of_the_token_that_is_chosen() -> None:
    exact = exact_logits()
    target = exact + noise(2)
    # The port's two likeliest tokens tie; a greedy choice takes the first, which is far below the golden's own.
    for token in range(64):
        exact[token, 0], exact[token, 1_500 + token] = -5.0, 20.0
        target[token, 0] = target[token, 1_500 + token] = 20.0
    result = compare(target, exact=exact)
    assert result.num_disagreeing - result.num_explained == 64
    assert result.overlaps[1] == pytest.approx(236 / 300, abs=0.05)
    assert all(choice.target == 0 and choice.margin > 20.0 for choice in result.worst_choices)


# Tokens of a small vocabulary, in more than one block.
FEW = torch.randn(20, 7, generator=torch.Generator().manual_seed(3))
PLACES = torch.stack((torch.arange(20) // 8, torch.arange(20) % 8 + 100), dim=1)


def small_rows(port: torch.Tensor, golden: torch.Tensor = FEW, **changes: Any) -> Rows:
    massive = torch.zeros(golden.shape[1], dtype=torch.bool)
    return replace(Rows(reference=golden, target=port, massive=massive, places=PLACES), **changes)


def floor_of(size: float) -> Squares:
    return Squares(ordinary=torch.full((20,), size).double(), massive=torch.zeros(20).double())


class TestNoise:
    def test_without_a_floor_it_is_the_usual_error_and_the_inherited_one(self) -> None:
        per_logit = FEW.double().norm(dim=1) / math.sqrt(7.0)
        handed_on = InputError(overall=0.1, tokens=torch.tensor([0.4] + [0.0] * 19))
        factors = torch.tensor([0.5] + [math.hypot(0.3, 0.1)] * 19)
        for error, expected in ((None, 0.3 * per_logit), (handed_on, factors * per_logit)):
            found = logit_noise(small_rows(FEW, input_error=error), usual_error=0.3)
            assert found.tolist() == pytest.approx(expected.tolist())

    def test_of_a_floor_it_is_that_of_the_average_logit(self) -> None:
        found = logit_noise(small_rows(FEW, floor=floor_of(28.0)), usual_error=9.0)
        assert found.tolist() == pytest.approx([2.0] * 20)


class TestForeseen:
    NOISE = torch.linspace(0.1, 0.2, 20).double()

    def test_twice_the_goldens_own_divergence_makes_it_larger(self) -> None:
        squares = self.NOISE.square()
        for size in (1e-3, 1.0):
            twin = FEW + size * torch.randn(20, 7, generator=torch.Generator().manual_seed(4))
            growth = 2.0 * float(divergences(twin, FEW).mean()) / float(squares.mean())
            assert (growth > 1.0) == (size == 1.0)
            found = foreseen_divergence(small_rows(FEW, twin=twin), self.NOISE)
            assert found.tolist() == pytest.approx((squares * max(growth, 1.0)).tolist())
        # Without a twin it is the square of the noise.
        found = foreseen_divergence(small_rows(FEW), self.NOISE)
        assert found.tolist() == pytest.approx(squares.tolist())


class TestSmallVocabulary:
    PORT = FEW + torch.randn(20, 7, generator=torch.Generator().manual_seed(5))

    def test_divergence_of_each_token_is_that_of_torch(self) -> None:
        golden, port = FEW.double().log_softmax(-1), self.PORT.double().log_softmax(-1)
        expected = torch.nn.functional.kl_div(port, golden, log_target=True, reduction="none").sum(-1)
        assert divergences(FEW, self.PORT).tolist() == pytest.approx(expected.tolist())

    def test_overlaps_are_shares_of_the_likeliest(self) -> None:
        overlaps = compare_logits(small_rows(self.PORT), usual_error=0.01).overlaps
        for k in (1, 5):
            shared = [
                len({*one.tolist()} & {*other.tolist()}) / k
                for one, other in zip(FEW.topk(k).indices, self.PORT.topk(k).indices, strict=True)
            ]
            assert overlaps[k] == pytest.approx(sum(shared) / 20)
        assert (list(overlaps), overlaps[10]) == ([1, 5, 10], 1.0)

    def test_five_unexplained_choices_are_named_the_widest_margin_first(self) -> None:
        golden = torch.zeros(20, 7)
        golden[:, 2] = 10.0
        port = golden.clone()
        for token in range(12, 19):
            golden[token, 4] = 10.0 - token / 4.0
            port[token, 4] = 11.0
        result = compare_logits(small_rows(port, golden), usual_error=0.0)
        assert (result.num_disagreeing, result.num_explained, result.num_tokens) == (7, 0, 20)
        assert result.worst_choices == tuple(
            TokenChoice(row=row, position=position, reference=2, target=4, margin=margin, reach=0.0)
            for row, position, margin in (
                (2, 102, 4.5),
                (2, 101, 4.25),
                (2, 100, 4.0),
                (1, 107, 3.75),
                (1, 106, 3.5),
            )
        )

    def test_worst_token_and_foreseen_figures_are_told(self) -> None:
        rows = small_rows(self.PORT)
        result = compare_logits(rows, usual_error=0.3)
        each = divergences(FEW, self.PORT)
        worst = int(each.argmax())
        assert (result.worst_token, result.kl_worst) == ((worst // 8, worst % 8 + 100), float(each[worst]))
        assert result.kl_mean == pytest.approx(float(each.mean()))
        assert result.kl_p95 == pytest.approx(float(torch.quantile(each, 0.95)))
        foreseen = logit_noise(rows, usual_error=0.3).square()
        assert result.kl_mean_foreseen == pytest.approx(float(foreseen.mean()))
        assert result.kl_p95_foreseen == pytest.approx(float(torch.quantile(foreseen, 0.95)))

    def test_margin_that_noise_just_reaches_is_explained(self) -> None:
        golden, port = torch.zeros(20, 4), torch.zeros(20, 4)
        golden[:, 0], port[3:, 0], port[:3, 1] = 1.0, 1.0, 1.0
        floor = floor_of(4.0 * (1.0 / 8.0) ** 2)  # of four logits
        rows = small_rows(port, golden, floor=floor)
        assert compare_logits(rows, usual_error=0.0).num_explained == 3
        smaller = replace(rows, floor=floor.times(0.99))
        found = compare_logits(smaller, usual_error=0.0)
        assert (found.num_disagreeing, found.num_explained) == (3, 0)
        assert [choice.position for choice in found.worst_choices] == [100, 101, 102]


class TestLimits:
    CHOICE = TokenChoice(row=1, position=9, reference=3, target=4, margin=2.0, reach=0.5)
    LIMITS = replace(calibrated_limits(), slack=3.0, backends=frozenset({"cpu"}))

    def test_fewer_tokens_may_diverge_more(self) -> None:
        assert [divergence_limit(number) for number in (0, 1, 4, 16, 99)] == [16.0, 16.0, 8.0, 4.0, 4.0]

    def judge(self, *, backend: str = "cpu", **changes: Any) -> Judgement:
        figures: dict[str, Any] = {"num_tokens": 16, "kl_mean": 0.0, "kl_p95": 0.0, "kl_worst": 0.0}
        figures |= {"worst_token": (0, 0), "kl_mean_foreseen": 1.0, "kl_p95_foreseen": 2.0}
        figures |= {"overlaps": {}, "num_disagreeing": 0, "num_explained": 0}
        context = LimitContext(backend=backend, is_float32=False, share=1e-3)
        result = LogitsResult(**{**figures, **changes})
        return judge_logits(result, noise=self.LIMITS, context=context)

    @pytest.mark.parametrize(("figure", "limit"), [("kl_mean", 4.0), ("kl_p95", 8.0)])
    def test_each_figure_is_held_to_its_own_foreseen_one(self, figure: str, limit: float) -> None:
        # The slack of errors is squared for divergences.
        for value, status, elsewhere in (
            (limit, SiteStatus.PASS, SiteStatus.PASS),
            (1.01 * limit, SiteStatus.FAIL, SiteStatus.WARN),
            (9.0 * limit, SiteStatus.FAIL, SiteStatus.WARN),
            (9.09 * limit, SiteStatus.FAIL, SiteStatus.FAIL),
            (math.nan, SiteStatus.FAIL, SiteStatus.FAIL),
        ):
            assert self.judge(**{figure: value})[0] is status, value
            assert self.judge(**{figure: value}, backend="neuron-xla")[0] is elsewhere, value

    def test_one_figure_far_beyond_fails_everywhere_beside_one_that_is_not(self) -> None:
        for far, near in (("kl_mean", "kl_p95"), ("kl_p95", "kl_mean")):
            assert self.judge(**{far: 99.0, near: 9.0}, backend="neuron-xla")[0] is SiteStatus.FAIL

    @pytest.mark.parametrize("backend", ["cpu", "neuron-xla"])
    def test_likeliest_token_beyond_noise_fails_everywhere(self, backend: str) -> None:
        options: dict[str, Any] = {"worst_choices": (self.CHOICE,), "backend": backend}
        reason = (
            "1 of 16 likeliest tokens are others beyond noise, the worst at row 1, token 9: 4 for 3, 2 below it "
            "where noise reaches 0.5"
        )
        found = self.judge(num_disagreeing=3, num_explained=2, **options)
        assert found == (SiteStatus.FAIL, reason)
        assert self.judge(num_disagreeing=3, num_explained=3, backend=backend)[0] is SiteStatus.PASS

"""Prompts and rows judged by their logits: noise passes, and what is planted in single tokens fails there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch

from compare.prompts.logits_verdict import LogitsVerdict, judge_logits
from compare.prompts.prompt_judge import (
    NoiseLevel,
    PortLogits,
    PromptJudge,
    PromptLimits,
    rounding_noise,
    token_noise,
)
from minimax_tools.golden_logits.golden_logits import GoldenLogits, TokenLogits, divergence, following_tokens
from minimax_tools.results.prompt_results import PromptResult, rank_prompts
from minimax_tools.results.results import Verdict
from minimax_tools.text.answered_prompts import AnsweredPrompt, split_rows

VOCABULARY, NUM_PROMPT, NUM_DECODED = 60, 12, 6
NUM_TOKENS = NUM_PROMPT + NUM_DECODED
SIGMA = 0.02
INPUT_IDS = torch.arange(NUM_TOKENS)
PROMPT = AnsweredPrompt(
    name="prompt 0",
    prompt_ids=tuple(range(NUM_PROMPT)),
    answer_ids=tuple(range(NUM_PROMPT, NUM_TOKENS)),
    prompt="",
)


def draw(seed: int, scale: float, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    return scale * torch.randn(num_tokens, VOCABULARY, generator=torch.Generator().manual_seed(seed))


EXACT = draw(0, 3.0)


def golden_of(exact: torch.Tensor, input_ids: torch.Tensor, *, seed: int = 0) -> GoldenLogits:
    """Golden logits of a row, with four right models beside the exact one."""
    candidates = exact.topk(16, dim=-1).indices
    noises = (draw(seed + number, SIGMA, len(exact)) for number in range(1, 5))
    first, *variants = (
        TokenLogits.of(logits, candidates=candidates, following=following_tokens(input_ids))
        for logits in (exact, *(exact + noise for noise in noises))
    )
    return GoldenLogits(input_ids=input_ids, candidates=candidates, exact=first, variants=tuple(variants))


@pytest.fixture(scope="module")
def golden() -> GoldenLogits:
    return golden_of(EXACT, INPUT_IDS)


@dataclass(frozen=True)
class Source:
    """Golden logits of rows, and those of one right model more of some."""

    goldens: Sequence[GoldenLogits]
    flipped: Mapping[tuple[int, ...], TokenLogits]

    def read(self, row: Sequence[int]) -> GoldenLogits:
        (found,) = (golden for golden in self.goldens if golden.row == tuple(row))
        return found

    def find_alternatives(self, goldens: Sequence[GoldenLogits]) -> list[GoldenLogits]:
        return [
            golden.with_alternatives(self.flipped[golden.row]) if golden.row in self.flipped else golden
            for golden in goldens
        ]


def judge_as(level: NoiseLevel, golden: GoldenLogits, logits: torch.Tensor) -> PromptResult:
    port = PortLogits(tokens=INPUT_IDS, logits=golden.measure(logits, INPUT_IDS))
    return PromptJudge(level=level).judge(0, PROMPT, golden, port)


@pytest.fixture(scope="module")
def judge(golden: GoldenLogits) -> Callable[..., PromptResult]:
    def run(logits: torch.Tensor, tokens: torch.Tensor = INPUT_IDS) -> PromptResult:
        port = PortLogits(tokens=tokens, logits=golden.measure(logits[tokens], tokens))
        return PromptJudge(level=NoiseLevel.of([golden])).judge(0, PROMPT, golden, port)

    return run


def test_ports_with_the_noise_of_right_models_pass(judge: Callable[..., PromptResult]) -> None:
    for seed in range(10, 30):
        result = judge(EXACT + draw(seed, SIGMA))
        assert (result.is_beyond, result.first) == (False, None), seed


@pytest.mark.parametrize("token", [0, 11, 12, 15])
def test_one_wrong_token_is_found_in_its_phase(token: int, judge: Callable[..., PromptResult]) -> None:
    logits = EXACT + draw(10, SIGMA)
    logits[token] += draw(99, 0.5)[token]
    result = judge(logits)
    assert result.first == token
    assert result.decode is not None
    assert result.prefill.is_beyond == (token < NUM_PROMPT)
    assert result.decode.is_beyond == (token >= NUM_PROMPT)
    assert result.step_of(token) == max(token - NUM_PROMPT + 1, 0)


def test_choices_beyond_noise_are_named_the_first_and_the_worst(judge: Callable[..., PromptResult]) -> None:
    logits = EXACT.clone()
    for token, rank in ((12, 4), (14, -1)):
        other = EXACT[token].argsort(descending=True)[rank]
        logits[token, other] = EXACT[token].max() + 1
    phase = judge(logits).phases[1]
    first, worst = phase.first_choice, phase.worst_choice
    assert first is not None
    assert worst is not None
    assert (first.token, worst.token) == (12, 14)
    assert worst.excess > first.excess > 1.0
    assert (worst.golden, worst.port) == (int(EXACT[14].argmax()), int(EXACT[14].argmin()))
    assert worst.margin is not None
    assert worst.margin > worst.reach


def test_nan_is_beyond_every_limit(judge: Callable[..., PromptResult]) -> None:
    logits = EXACT.clone()
    logits[13] = torch.nan
    result = judge(logits)
    assert result.first == 13
    assert result.excess == float("inf")
    assert result.port_log_likelihood is None


def test_small_error_of_every_token_is_beyond_noise_in_their_number(judge: Any) -> None:
    """A single such token would pass."""
    result = judge(EXACT + draw(11, 2.2 * SIGMA))
    assert not result.prefill.beyond
    assert result.prefill.share_outside > 0.75
    assert result.prefill.is_beyond


def test_logits_of_the_last_prompt_token_alone_are_judged(judge: Callable[..., PromptResult]) -> None:
    result = judge(EXACT + draw(10, SIGMA), torch.arange(NUM_PROMPT - 1, NUM_TOKENS))
    assert result.prefill.tokens == (NUM_PROMPT - 1,)
    assert not result.is_beyond
    assert result.golden_log_likelihood is not None


def test_noise_of_rounding_leaves_out_variants_that_flip_experts(golden: GoldenLogits) -> None:
    # The last two of four variants.
    by_variant = [divergence(golden.exact, variant) for variant in golden.variants]
    torch.testing.assert_close(rounding_noise(golden), torch.maximum(*by_variant[:2]))
    torch.testing.assert_close(token_noise(golden), torch.stack(by_variant).amax(0))


def test_likelihood_is_that_of_the_answers_tokens(judge: Callable[..., PromptResult]) -> None:
    chances = EXACT.double().log_softmax(-1)
    answer = sum(float(chances[token - 1, token]) for token in range(NUM_PROMPT, NUM_TOKENS))
    found = judge(EXACT)
    assert found.golden_log_likelihood == pytest.approx(answer, rel=1e-5)
    assert found.port_log_likelihood == pytest.approx(answer, rel=1e-5)


def test_one_token_of_a_long_list_may_be_farther(golden: GoldenLogits) -> None:
    # Of 80,000 tokens, twice as far.
    level = NoiseLevel.of([golden])
    long = replace(level, num_tokens=80_000)

    def judge(level: NoiseLevel, size: float) -> PromptResult:
        logits = EXACT.clone()
        logits[3] += draw(99, 1.0)[3] * size
        return judge_as(level, golden, logits)

    # Small divergences grow with the square of the error: one of seven times the noise.
    size = 0.1 * (7.0 / judge(level, 0.1).excess) ** 0.5
    assert judge(level, size).excess == pytest.approx(7.0, rel=0.2)
    assert judge(level, size).prefill.beyond == (3,)
    assert judge(long, size).prefill.beyond == ()
    # So may its choice.
    logits = EXACT.clone()
    logits[3, int(EXACT[3].argmin())] = EXACT[3].max() + 9
    near, far = (judge_as(chosen, golden, logits).prefill.worst_choice for chosen in (level, long))
    assert near is not None
    assert far is not None
    assert far.reach > 1.2 * near.reach


def test_error_is_beyond_a_golden_without_noise(golden: GoldenLogits) -> None:
    noiseless = replace(golden, variants=(golden.exact,) * len(golden.variants))
    logits = EXACT.clone()
    logits[3] += draw(99, 0.5)[3]
    assert judge_as(NoiseLevel.of([noiseless]), noiseless, logits).prefill.beyond == (3,)


def test_limits_on_shares_allow_four_deviations() -> None:
    limits = PromptLimits()
    # Of 48 tokens, a quarter: 0.25 and four times √(0.25 · 0.75 / 48).
    assert limits.limit_alone(48) == pytest.approx(0.5)
    assert limits.limit_alone(0) == limits.limit_alone(1) > 1
    # A third, of four tokens of each prompt or all of fewer.
    assert limits.limit_together(500, num_prompts=32) == pytest.approx(0.5)
    assert limits.limit_together(32, num_prompts=32) == pytest.approx(2 / 3)
    # Limits grow with the tokens of a list.
    assert limits.widening(10) == limits.widening(5000) == 1
    assert limits.widening(80_000) == pytest.approx(2)


def test_small_error_of_few_tokens_shows_in_many_prompts(golden: GoldenLogits, judge: Any) -> None:
    """A decode phase of six tokens proves nothing alone."""
    together = PromptJudge(level=NoiseLevel.of([golden])).judge_together
    right = [judge(EXACT + draw(seed, SIGMA)) for seed in range(10, 22)]
    wrong = [judge(EXACT + draw(seed, 1.7 * SIGMA)) for seed in range(10, 22)]
    assert not any(result.is_beyond for result in right)
    assert not any(share.is_beyond for share in together(right))
    prefill, decode = together(wrong)
    assert prefill.is_beyond
    assert decode.is_beyond
    assert decode.num_tokens == 12 * NUM_DECODED


def test_worst_prompt_is_ranked_first(judge: Callable[..., PromptResult]) -> None:
    right, wrong, worse = EXACT + draw(10, SIGMA), EXACT.clone(), EXACT.clone()
    wrong[3] += draw(99, 0.5)[3]
    worse[3] += draw(99, 3.0)[3]
    results = [judge(logits) for logits in (right, wrong, worse)]
    ranking = rank_prompts(results, num_known=0, golden_logits="")
    assert ranking.results == (results[2], results[1], results[0])
    assert ranking.differing == (results[2], results[1])
    assert ranking.verdict is Verdict.FAIL


def test_margin_of_another_choice_is_told_for_every_token_of_the_vocabulary(judge: Any) -> None:
    for chosen in (0, 1, VOCABULARY - 1):
        logits = EXACT.clone()
        logits[5] = logits[5].roll(chosen - int(logits[5].argmax()))
        result = judge(logits)
        assert result.prefill.first_choice is not None
        assert (result.prefill.first_choice.port, result.prefill.first_choice.token) == (chosen, 5)
        assert result.prefill.first_choice.margin is not None


def test_limits_are_those_that_were_measured() -> None:
    """Change a limit after a calibration alone, and here too."""
    assert asdict(PromptLimits()) == {
        "excess": 5.0,
        "choice": 3.0,
        "pooled": 0.5,
        "pooled_distance": 1.0,
        "usual_tokens": 5000,
        "share_alone": 0.25,
        "share_together": 1 / 3,
        "share_deviations": 4.0,
        "tokens_apart": 4,
    }


FLIPPED = EXACT.clone()
FLIPPED[3] += draw(99, 1.0)[3]


@pytest.mark.parametrize(("num_prompts", "num_differing"), [(1, 0), (8, 0), (9, 9)])
def test_flips_of_more_prompts_than_chance_sends_there_excuse_none(
    num_prompts: int, num_differing: int, golden: GoldenLogits
) -> None:
    port = PortLogits(tokens=INPUT_IDS, logits=golden.measure(FLIPPED, INPUT_IDS))
    judge = PromptJudge(level=NoiseLevel.of([golden]))
    # A right model sends the third token to another expert.
    source = Source([golden], {golden.row: golden.measure(FLIPPED, INPUT_IDS)})
    results = judge.judge_all([PROMPT] * num_prompts, [port] * num_prompts, source)
    assert sum(result.is_beyond for result in results) == num_differing
    assert sum(result.num_flipped for result in results) == num_prompts - num_differing


# Three rows in one verdict.
ROW_LENGTH = 30
ROWS = [tuple(range(row, row + ROW_LENGTH)) for row in range(3)]
EXACT_ROWS = [draw(row, 3.0, ROW_LENGTH) for row in range(3)]


@pytest.fixture(scope="module")
def goldens() -> list[GoldenLogits]:
    pairs = enumerate(zip(EXACT_ROWS, ROWS, strict=True))
    return [golden_of(exact, torch.tensor(ids), seed=100 * row) for row, (exact, ids) in pairs]


def judge_rows(
    goldens: list[GoldenLogits], ports: list[torch.Tensor], flipped: torch.Tensor | None = None
) -> LogitsVerdict:
    """Judge ports of all rows; `flipped` are the logits of one right model more of the second."""
    tokens = torch.arange(ROW_LENGTH)
    measured = [
        PortLogits(tokens=tokens, logits=golden.measure(logits, tokens))
        for golden, logits in zip(goldens, ports, strict=True)
    ]
    prompts = split_rows(ROWS, num_decoded=NUM_DECODED)
    source = Source(goldens, {} if flipped is None else {ROWS[1]: goldens[1].measure(flipped, tokens)})
    return judge_logits(prompts, measured, source, through="two layers")


def right() -> list[torch.Tensor]:
    return [exact.clone() for exact in EXACT_ROWS]


def noisy(seed: int, scale: float) -> list[torch.Tensor]:
    return [exact + draw(seed + row, scale * SIGMA, ROW_LENGTH) for row, exact in enumerate(EXACT_ROWS)]


def test_noise_of_right_models_is_right(goldens: list[GoldenLogits]) -> None:
    for seed in range(5):
        verdict = judge_rows(goldens, noisy(1000 + 10 * seed, 1.0))
        assert (verdict.is_right, verdict.reason) == (True, "")
        assert 0.0 < verdict.excess <= 1.0


@pytest.mark.parametrize(("token", "step"), [(4, 0), (ROW_LENGTH - 1, NUM_DECODED)])
def test_row_and_pass_of_a_wrong_token_are_told(goldens: list[GoldenLogits], token: int, step: int) -> None:
    ports = right()
    ports[1][token] = ports[1][token].roll(1)
    verdict = judge_rows(goldens, ports)
    assert (verdict.is_right, verdict.first_pass) == (False, step)
    assert verdict.excess > 1.0
    assert verdict.reason.startswith(f"row 1, token {token}: the likeliest next token is")
    assert "through two layers" in verdict.reason


def test_logits_that_are_not_finite_are_wrong(goldens: list[GoldenLogits]) -> None:
    ports = right()
    ports[2][0, 0] = float("nan")
    verdict = judge_rows(goldens, ports)
    assert (verdict.is_right, verdict.excess) == (False, math.inf)


def test_phase_of_many_tokens_a_little_farther_is_told(goldens: list[GoldenLogits]) -> None:
    for seed, scale, first_pass in ((2000, 1.3, 0), (3000, 1.5, 1)):
        verdict = judge_rows(goldens, noisy(seed, scale))
        assert (verdict.first_pass, verdict.excess > 1.0) == (first_pass, True)
    together = judge_rows(goldens, noisy(3047, 1.4))
    assert (together.is_right, together.first_pass) == (False, 1)
    assert together.reason.startswith("89 % of the tokens of the decode are farther from the exact model")
    assert 1.0 < together.excess < 1.2


@pytest.mark.parametrize("token", [4, ROW_LENGTH - 1])
def test_excess_is_above_one_where_one_token_is_wrong(goldens: list[GoldenLogits], token: int) -> None:
    found = []
    for size in range(1, 40):
        ports = right()
        ports[1][token] += size * draw(7, SIGMA, ROW_LENGTH)[token]
        found.append(judge_rows(goldens, ports))
    assert [verdict.is_right for verdict in found] == [verdict.excess <= 1.0 for verdict in found]
    assert found[0].is_right
    assert not found[-1].is_right


@pytest.fixture
def flipped() -> torch.Tensor:
    """Return the logits of a right model of the second row that sends one token to another expert."""
    logits = EXACT_ROWS[1].clone()
    logits[4] += draw(7, 1.0, ROW_LENGTH)[4]
    return logits


def test_token_near_another_right_model_is_right(goldens: list[GoldenLogits], flipped: torch.Tensor) -> None:
    ports = [EXACT_ROWS[0], flipped + draw(50, SIGMA, ROW_LENGTH), EXACT_ROWS[2]]
    assert not judge_rows(goldens, ports).is_right
    verdict = judge_rows(goldens, ports, flipped)
    assert verdict.is_right
    assert verdict.num_flipped == 1


def test_token_as_far_as_another_right_model_but_elsewhere_is_wrong(goldens: Any, flipped: Any) -> None:
    """The flip of a right model does not widen what is noise: the port must make the same."""
    ports = right()
    ports[1][4] += draw(8, 1.0, ROW_LENGTH)[4]
    verdict = judge_rows(goldens, ports, flipped)
    assert (verdict.is_right, verdict.first_pass) == (False, 0)


def test_many_tokens_beyond_noise_need_no_other_models(goldens: Any, flipped: torch.Tensor) -> None:
    """Flips are rare: a row of which many tokens differ has a mistake, whatever model is near it."""
    moved = EXACT_ROWS[1] + draw(9, 1.0, ROW_LENGTH)
    assert not judge_rows(goldens, [EXACT_ROWS[0], moved, EXACT_ROWS[2]], moved).is_right

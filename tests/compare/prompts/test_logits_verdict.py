"""The logits of a run's rows in one verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from compare.prompts.logits_verdict import LogitsVerdict, judge_logits
from compare.prompts.prompt_judge import PortLogits
from minimax_tools.golden_logits.golden_logits import GoldenLogits, TokenLogits, following_tokens
from minimax_tools.text.answered_prompts import split_rows

VOCABULARY, NUM_TOKENS, NUM_DECODED, NUM_ROWS = 60, 30, 6, 3
SIGMA = 0.02
ROWS = [tuple(range(row, row + NUM_TOKENS)) for row in range(NUM_ROWS)]


def draw(seed: int, scale: float) -> torch.Tensor:
    return scale * torch.randn(NUM_TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(seed))


EXACT = [draw(row, 3.0) for row in range(NUM_ROWS)]


@dataclass(frozen=True)
class Source:
    """Golden logits of all rows; `flipped` are those of one right model more of the second row."""

    goldens: list[GoldenLogits]
    flipped: TokenLogits | None = None

    def read(self, row: Sequence[int]) -> GoldenLogits:
        return self.goldens[ROWS.index(tuple(row))]

    def find_alternatives(self, goldens: Sequence[GoldenLogits]) -> list[GoldenLogits]:
        is_flipped = self.flipped is not None
        return [
            golden.with_alternatives(self.flipped) if is_flipped and golden.row == ROWS[1] else golden
            for golden in goldens
        ]


@pytest.fixture(scope="module")
def goldens() -> list[GoldenLogits]:
    found = []
    for row, exact_tv in enumerate(EXACT):
        input_ids, candidates = torch.tensor(ROWS[row]), exact_tv.topk(16, dim=-1).indices
        exact, *variants = (
            TokenLogits.of(logits, candidates=candidates, following=following_tokens(input_ids))
            for logits in (exact_tv, *(exact_tv + draw(100 * row + seed, SIGMA) for seed in range(1, 5)))
        )
        found.append(
            GoldenLogits(input_ids=input_ids, candidates=candidates, exact=exact, variants=tuple(variants))
        )
    return found


def judge(
    goldens: list[GoldenLogits], ports: list[torch.Tensor], flipped: torch.Tensor | None = None
) -> LogitsVerdict:
    tokens = torch.arange(NUM_TOKENS)
    measured = [
        PortLogits(tokens=tokens, logits=golden.measure(logits, tokens))
        for golden, logits in zip(goldens, ports, strict=True)
    ]
    prompts = split_rows(ROWS, num_decoded=NUM_DECODED)
    source = Source(goldens, None if flipped is None else goldens[1].measure(flipped, tokens))
    return judge_logits(prompts, measured, source, through="two layers")


def right() -> list[torch.Tensor]:
    return [exact.clone() for exact in EXACT]


def noisy(seed: int, scale: float) -> list[torch.Tensor]:
    return [exact + draw(seed + row, scale * SIGMA) for row, exact in enumerate(EXACT)]


def test_noise_of_right_models_is_right(goldens: list[GoldenLogits]) -> None:
    for seed in range(5):
        verdict = judge(goldens, noisy(1000 + 10 * seed, 1.0))
        assert (verdict.is_right, verdict.reason) == (True, "")
        assert 0.0 < verdict.excess <= 1.0


@pytest.mark.parametrize(("token", "step"), [(4, 0), (NUM_TOKENS - 1, NUM_DECODED)])
def test_row_and_pass_of_a_wrong_token_are_told(goldens: list[GoldenLogits], token: int, step: int) -> None:
    ports = right()
    ports[1][token] = ports[1][token].roll(1)
    verdict = judge(goldens, ports)
    assert (verdict.is_right, verdict.first_pass) == (False, step)
    assert verdict.excess > 1.0
    assert verdict.reason.startswith(f"row 1, token {token}: the likeliest next token is")
    assert "through two layers" in verdict.reason


def test_logits_that_are_not_finite_are_wrong(goldens: list[GoldenLogits]) -> None:
    ports = right()
    ports[2][0, 0] = float("nan")
    verdict = judge(goldens, ports)
    assert (verdict.is_right, verdict.excess) == (False, math.inf)


def test_phase_of_many_tokens_a_little_farther_is_told(goldens: list[GoldenLogits]) -> None:
    for seed, scale, first_pass in ((2000, 1.3, 0), (3000, 1.5, 1)):
        verdict = judge(goldens, noisy(seed, scale))
        assert (verdict.first_pass, verdict.excess > 1.0) == (first_pass, True)
    together = judge(goldens, noisy(3047, 1.4))
    assert (together.is_right, together.first_pass) == (False, 1)
    assert together.reason.startswith("89 % of the tokens of the decode are farther from the exact model")
    assert 1.0 < together.excess < 1.2


@pytest.mark.parametrize("token", [4, NUM_TOKENS - 1])
def test_excess_is_above_one_where_one_token_is_wrong(goldens: list[GoldenLogits], token: int) -> None:
    found = []
    for size in range(1, 40):
        ports = right()
        ports[1][token] += size * draw(7, SIGMA)[token]
        found.append(judge(goldens, ports))
    assert [verdict.is_right for verdict in found] == [verdict.excess <= 1.0 for verdict in found]
    assert found[0].is_right
    assert not found[-1].is_right


@pytest.fixture
def flipped() -> torch.Tensor:
    """Return the logits of a right model of the second row that sends one token to another expert."""
    logits = EXACT[1].clone()
    logits[4] += draw(7, 1.0)[4]
    return logits


def test_token_near_another_right_model_is_right(goldens: list[GoldenLogits], flipped: torch.Tensor) -> None:
    ports = [EXACT[0], flipped + draw(50, SIGMA), EXACT[2]]
    assert not judge(goldens, ports).is_right
    verdict = judge(goldens, ports, flipped)
    assert verdict.is_right
    assert verdict.num_flipped == 1


def test_token_as_far_as_another_right_model_but_elsewhere_is_wrong(goldens: Any, flipped: Any) -> None:
    """The flip of a right model does not widen what is noise: the port must make the same."""
    ports = right()
    ports[1][4] += draw(8, 1.0)[4]
    verdict = judge(goldens, ports, flipped)
    assert (verdict.is_right, verdict.first_pass) == (False, 0)


def test_many_tokens_beyond_noise_need_no_other_models(goldens: Any, flipped: torch.Tensor) -> None:
    """Flips are rare: a row of which many tokens differ has a mistake, whatever model is near it."""
    moved = EXACT[1] + draw(9, 1.0)
    assert not judge(goldens, [EXACT[0], moved, EXACT[2]], moved).is_right

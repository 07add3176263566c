"""Wrong tokens speak for two experts, or for a position, only if right tokens do not contradict."""

from __future__ import annotations

import torch

from compare.diagnosis.wrong_tokens import WrongTokens

NUM_TOKENS, NUM_EXPERTS = 120, 16


def wrong_tokens(is_wrong: torch.Tensor, experts: torch.Tensor) -> WrongTokens:
    positions = torch.arange(NUM_TOKENS) % 60
    return WrongTokens(is_wrong=is_wrong, experts=experts, positions=positions, num_experts=NUM_EXPERTS)


def random_experts() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(2).indices


def test_two_experts_whose_tokens_alone_are_wrong_are_found() -> None:
    experts = random_experts()
    is_wrong = ((experts == 5) | (experts == 6)).any(1)
    assert wrong_tokens(is_wrong, experts).exchanged_experts()[0] == (5, 6)


def test_no_pair_is_found_where_all_or_any_tokens_are_wrong() -> None:
    experts = random_experts()
    everywhere = torch.ones(NUM_TOKENS, dtype=torch.bool)
    scattered = torch.rand(NUM_TOKENS, generator=torch.Generator().manual_seed(1)) < 0.3
    for is_wrong in (everywhere, ~everywhere, scattered):
        assert wrong_tokens(is_wrong, experts).exchanged_experts() == ()


def test_first_wrong_position_comes_first() -> None:
    is_wrong = torch.arange(NUM_TOKENS) % 60 >= 45
    assert wrong_tokens(is_wrong, random_experts()).first_wrong_positions() == (45, 44, 43)


def test_no_position_is_found_where_nothing_before_is_right() -> None:
    everywhere = torch.ones(NUM_TOKENS, dtype=torch.bool)
    for is_wrong in (everywhere, ~everywhere):
        assert wrong_tokens(is_wrong, random_experts()).first_wrong_positions() == ()

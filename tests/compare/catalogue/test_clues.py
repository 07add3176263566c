"""Wrong tokens speak for two experts, or for a position, only if right tokens do not contradict."""

from __future__ import annotations

import pytest
import torch

from compare.catalogue.clues import WrongTokens

NUM_TOKENS, NUM_EXPERTS = 120, 16


def wrong_tokens(
    is_wrong: torch.Tensor, experts: torch.Tensor, positions: torch.Tensor | None = None
) -> WrongTokens:
    places = torch.arange(len(is_wrong)) if positions is None else positions
    return WrongTokens(is_wrong=is_wrong, experts=experts, positions=places, num_experts=NUM_EXPERTS)


def one_expert_each(*experts: int) -> torch.Tensor:
    return torch.tensor(experts)[:, None]


RANDOM_EXPERTS = (
    torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(0)).topk(2).indices
)
EVERYWHERE = torch.ones(NUM_TOKENS, dtype=torch.bool)


def test_two_experts_whose_tokens_alone_are_wrong_are_found() -> None:
    is_wrong = ((RANDOM_EXPERTS == 5) | (RANDOM_EXPERTS == 6)).any(1)
    assert wrong_tokens(is_wrong, RANDOM_EXPERTS).exchanged_experts()[0] == (5, 6)
    scattered = torch.rand(NUM_TOKENS, generator=torch.Generator().manual_seed(1)) < 0.3
    for other in (EVERYWHERE, ~EVERYWHERE, scattered):
        assert wrong_tokens(other, RANDOM_EXPERTS).exchanged_experts() == ()


def test_first_wrong_position_comes_first() -> None:
    positions = torch.arange(NUM_TOKENS) % 60
    assert wrong_tokens(positions >= 45, RANDOM_EXPERTS, positions).first_wrong_positions() == (45, 44, 43)
    # Nothing before it is right.
    for is_wrong in (EVERYWHERE, ~EVERYWHERE):
        assert wrong_tokens(is_wrong, RANDOM_EXPERTS, positions).first_wrong_positions() == ()


@pytest.mark.parametrize(
    ("num_wrong_of_first", "num_wrong_elsewhere", "is_found"),
    [(10, 0, True), (8, 0, True), (7, 0, False), (10, 2, True), (10, 3, False)],
)
def test_a_quarter_of_the_tokens_and_a_tenth_of_the_wrong_ones_may_contradict(
    num_wrong_of_first: int, num_wrong_elsewhere: int, is_found: bool
) -> None:
    # Ten tokens each of the experts 1 and 2, twenty of 3.
    experts = one_expert_each(*[1] * 10, *[2] * 10, *[3] * 20)
    is_wrong = torch.zeros(40, dtype=torch.bool)
    is_wrong[:num_wrong_of_first] = is_wrong[10:20] = is_wrong[20 : 20 + num_wrong_elsewhere] = True
    assert wrong_tokens(is_wrong, experts).exchanged_experts() == (((1, 2),) if is_found else ())


def test_two_experts_that_all_tokens_choose_and_one_of_one_token_tell_nothing() -> None:
    experts = one_expert_each(*[1] * 10, *[2] * 10)
    for num_wrong, pairs in ((19, ((1, 2),)), (20, ())):
        assert wrong_tokens(torch.arange(20) < num_wrong, experts).exchanged_experts() == pairs
    for num_takers, pairs in ((1, ()), (2, ((1, 2),))):
        experts = one_expert_each(*[1] * 10, *[2] * num_takers, *[3] * 20)
        assert wrong_tokens(experts[:, 0] < 3, experts).exchanged_experts() == pairs


def test_few_pairs_are_returned_and_the_best_first() -> None:
    # Every wrong token chose five experts, but the first one lacks expert 0.
    experts = torch.arange(5).repeat(20, 1)
    experts[0, 0] = 5
    experts = torch.cat((experts, torch.full((20, 5), 5)))
    tokens = wrong_tokens(torch.arange(40) < 20, experts)
    assert tokens.exchanged_experts() == ((0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3))
    experts[19] = torch.tensor([5, 5, 2, 3, 5])
    # Pairs with 2 or 3 account for all tokens, the pairs of 0, 1 and 4 for all but one.
    assert tokens.exchanged_experts() == ((0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (2, 4))


@pytest.mark.parametrize(
    ("right", "wrong", "positions"),
    [
        # A token is right at position 0; the two before the first wrong one may be wrong too.
        ((0, 1, 2), (3, 4), (3, 2, 1)),
        ((0, 1), (2, 3), ()),
        ((0, 1, 2, 3), (4,), (4, 3, 2)),
        # Positions between the last right and the first wrong token are not known; at most eight are tried.
        ((0,), (5, 6), (5, 4, 3, 2, 1)),
        ((0, 1), (9,), (9, 8, 7, 6, 5, 4, 3, 2)),
        ((0, 20), (9,), (9, 8, 7, 6, 5, 4, 3, 2)),
        # No token is right before.
        ((9, 20), (8,), ()),
        ((8,), (8, 9), ()),
    ],
)
def test_positions_between_right_and_wrong_tokens(
    right: tuple[int, ...], wrong: tuple[int, ...], positions: tuple[int, ...]
) -> None:
    places = torch.tensor([*right, *wrong])
    is_wrong, experts = torch.arange(len(places)) >= len(right), one_expert_each(*[0] * len(places))
    assert wrong_tokens(is_wrong, experts, places).first_wrong_positions() == positions

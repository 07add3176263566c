"""Next-token logits at some candidates: divergences, likelihoods, and logits that are not finite."""

from __future__ import annotations

import pytest
import torch

from minimax_tools.golden_logits.golden_logits import NO_CHOICE, TokenLogits, divergence

VOCABULARY = 50


def draw_logits(seed: int, num_tokens: int = 6) -> torch.Tensor:
    return 3 * torch.randn(num_tokens, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def take(logits: torch.Tensor, candidates: torch.Tensor) -> TokenLogits:
    return TokenLogits.of(logits, candidates=candidates, following=torch.arange(len(logits)))


def exact_divergence(reference: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    first, second = reference.double().log_softmax(-1), target.double().log_softmax(-1)
    return (first.exp() * (first - second)).sum(-1)


def test_divergence_over_all_tokens_is_that_of_the_distributions() -> None:
    reference, target = draw_logits(0), draw_logits(1)
    candidates = reference.topk(VOCABULARY, dim=-1).indices
    found = divergence(take(reference, candidates), take(target, candidates))
    torch.testing.assert_close(found, exact_divergence(reference, target), rtol=1e-4, atol=1e-6)


def test_divergence_over_candidates_is_less_and_grows_with_their_number() -> None:
    reference, target = draw_logits(0), draw_logits(1)
    whole = exact_divergence(reference, target)
    smaller = torch.zeros_like(whole)
    for number in (2, 8, 32):
        candidates = reference.topk(number, dim=-1).indices
        found = divergence(take(reference, candidates), take(target, candidates))
        assert bool((found <= whole * (1 + 1e-4)).all())
        assert bool((found >= smaller * (1 - 1e-4)).all())
        smaller = found


def test_token_beyond_the_candidates_is_seen_in_the_remainder() -> None:
    reference = draw_logits(0)
    candidates = reference.topk(4, dim=-1).indices
    target = reference.scatter(-1, reference.argmin(-1, keepdim=True), 30.0)
    right, wrong = take(reference, candidates), take(target, candidates)
    assert float(divergence(right, wrong).min()) > 1
    assert wrong.choices.tolist() == reference.argmin(-1).tolist()


def test_likelihood_of_the_following_token_is_that_of_all_logits() -> None:
    logits = draw_logits(2)
    found = take(logits, logits.topk(4, dim=-1).indices).following_log_probability()
    expected = logits.double().log_softmax(-1)[torch.arange(6), torch.arange(6)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_nan_has_no_choice_and_no_divergence() -> None:
    reference = draw_logits(0)
    target = reference.clone()
    target[2, 7] = torch.nan
    candidates = reference.topk(8, dim=-1).indices
    wrong = take(target, candidates)
    assert wrong.choices[2] == NO_CHOICE
    found = divergence(take(reference, candidates), wrong)
    assert bool(found[2].isnan())
    assert found[[0, 1, 3, 4, 5]].tolist() == pytest.approx([0.0] * 5, abs=1e-9)

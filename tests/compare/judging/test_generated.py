from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compare.judging.logits import REACH, FirstLogits, compare_generated
from minimax_tools.capture.passes import Continuation, Generation, Likely
from minimax_tools.results.results import GeneratedRow, SiteStatus

SIGMA = 0.1
LIKELIEST = (
    (Likely(token=7, behind=0.0), Likely(token=3, behind=2.0)),
    (Likely(token=8, behind=0.0), Likely(token=4, behind=0.5), Likely(token=5, behind=3.0)),
)
GOLDEN = Generation(
    rows=(Continuation(prompt_ids=(1, 2), generated_ids=(7, 8), text=None, likeliest=LIKELIEST),),
    sampling={"do_sample": False},
)


BARE = replace(GOLDEN, rows=(replace(GOLDEN.rows[0], likeliest=()),))


def port(*tokens: int) -> Generation:
    row = Continuation(prompt_ids=(1, 2), generated_ids=tokens, text=None)
    return Generation(rows=(row,), sampling={"do_sample": False})


def compare(
    target: Generation,
    *,
    golden: Generation = GOLDEN,
    noise: float | None = SIGMA,
    first: FirstLogits | None = None,
) -> GeneratedRow:
    places = torch.tensor([[0, 0], [0, 1]])
    size = None if noise is None else torch.full((2,), noise)
    [row] = compare_generated(golden, target, noise=size, places=places, first=first)
    return row


def test_same_tokens_pass_as_far_as_the_shorter_text_goes() -> None:
    row = compare(port(7, 8))
    assert (row.status, row.num_alike, row.num_compared, row.reference) == (SiteStatus.PASS, 2, 2, None)
    row = compare(port(7))
    assert (row.status, row.num_alike, row.num_compared) == (SiteStatus.PASS, 1, 1)
    row = compare(port())
    assert (row.status, row.reason, row.num_compared) == (SiteStatus.NOT_JUDGED, "no token was compared", 0)


@pytest.mark.parametrize(
    ("tokens", "status", "place", "margin"),
    [
        ((7, 4), SiteStatus.PASS, 1, 0.5),
        ((7, 5), SiteStatus.FAIL, 1, 3.0),
        ((3, 8), SiteStatus.FAIL, 0, 2.0),
        # What the golden did not keep is further behind than all that it kept.
        ((7, 99), SiteStatus.FAIL, 1, 3.0),
    ],
)
def test_first_difference_is_held_against_the_goldens_margin(
    tokens: tuple[int, ...], status: SiteStatus, place: int, margin: float
) -> None:
    row = compare(port(*tokens))
    assert (row.status, row.num_alike, row.margin) == (status, place, margin)
    assert (row.reference, row.target) == (GOLDEN.rows[0].generated_ids[place], tokens[place])
    assert row.reach == pytest.approx(REACH * SIGMA)


def test_token_that_was_not_kept_is_not_judged_where_noise_reaches_beyond_all_that_were() -> None:
    row = compare(port(7, 99), noise=1.0)
    assert row.status is SiteStatus.NOT_JUDGED
    assert row.reason == "the golden kept only tokens less than 3 below its own, noise reaches 8"


def test_what_the_golden_does_not_tell_is_not_judged() -> None:
    for row in (compare(port(7, 5), golden=BARE), compare(port(7, 5), noise=None)):
        assert row.status is SiteStatus.NOT_JUDGED
        assert row.reason == "the golden does not tell how close the choice was"
    for likeliest in (LIKELIEST[:1], (LIKELIEST[0], ())):
        golden = replace(GOLDEN, rows=(replace(GOLDEN.rows[0], likeliest=likeliest),))
        row = compare(port(7, 4), golden=golden)
        assert (row.status, row.num_alike, row.margin) == (SiteStatus.NOT_JUDGED, 1, None)
    drawn = replace(GOLDEN, sampling={"do_sample": True})
    assert compare(port(7, 5), golden=drawn).reason == "the golden drew its tokens"
    assert compare(port(7, 8), golden=drawn).status is SiteStatus.NOT_JUDGED


def test_a_margin_that_noise_just_reaches_is_explained() -> None:
    likeliest = (LIKELIEST[0], (Likely(token=8, behind=0.0), Likely(token=4, behind=REACH * 0.125)))
    golden = replace(GOLDEN, rows=(replace(GOLDEN.rows[0], likeliest=likeliest),))
    assert compare(port(7, 4), golden=golden, noise=0.125).status is SiteStatus.PASS


def first_logits(golden: int, own: int) -> FirstLogits:
    """The logits behind the prompt, with these likeliest tokens."""
    reference, target = torch.zeros(1, 10), torch.zeros(1, 10)
    reference[0, golden] = target[0, own] = 5.0
    return FirstLogits(reference=reference, target=target)


class TestOwnLogits:
    """A token must be what the port's own logits choose."""

    def test_the_likeliest_passes_and_another_fails_though_it_is_the_goldens(self) -> None:
        assert compare(port(7, 8), first=first_logits(7, 7)).status is SiteStatus.PASS
        row = compare(port(7, 8), first=first_logits(7, 2))
        assert (row.status, row.num_alike, row.target) == (SiteStatus.FAIL, 0, 7)
        assert row.reason == "5 below token 2 by the port's own logits, noise reaches 0.8"

    def test_what_was_drawn_or_has_no_noise_is_not_held_against_them(self) -> None:
        drawn = replace(port(7, 8), sampling={"do_sample": True})
        assert compare(drawn, first=first_logits(7, 2)).status is SiteStatus.PASS
        row = compare(port(7, 8), first=first_logits(7, 2), noise=None)
        assert (row.status, row.num_alike) == (SiteStatus.PASS, 2)

    def test_golden_without_alternatives_is_judged_at_the_first_token(self) -> None:
        first = first_logits(7, 3)
        first.reference[0, 3] = 0.5
        row = compare(port(3, 8), golden=BARE, first=first)
        assert (row.status, row.margin) == (SiteStatus.FAIL, 4.5)

    def test_kept_candidates_stay(self) -> None:
        assert compare(port(3, 8), first=first_logits(7, 3)).margin == 2.0
        later = replace(GOLDEN, rows=(replace(GOLDEN.rows[0], likeliest=((), LIKELIEST[1])),))
        assert compare(port(7, 4), golden=later, first=first_logits(7, 7)).margin == 0.5
        assert compare(port(3, 8), golden=later, first=first_logits(7, 3)).margin == 5.0

    def test_a_margin_that_noise_just_reaches_is_the_port_s_choice(self) -> None:
        first = first_logits(7, 2)
        first.target[0, 7] = 4.0
        assert compare(port(7, 8), first=first, noise=1.0 / REACH).status is SiteStatus.PASS
        assert compare(port(7, 8), first=first, noise=0.99 / REACH).status is SiteStatus.FAIL

    def test_a_row_that_failed_keeps_its_reason(self) -> None:
        row = compare(port(3, 8), first=first_logits(7, 2))
        assert (row.status, row.reason) == (SiteStatus.FAIL, "2 below the golden's token, noise reaches 0.8")

    def test_a_later_token_is_held_against_the_port_s_own_candidates(self) -> None:
        target = port(7, 8, 9)
        kept = (*LIKELIEST[:1], (Likely(token=4, behind=0.0), Likely(token=8, behind=1.5)), LIKELIEST[0])
        target = replace(target, rows=(replace(target.rows[0], likeliest=kept),))
        row = compare(target, first=first_logits(7, 7))
        assert (row.status, row.num_alike, row.num_compared) == (SiteStatus.FAIL, 1, 2)
        assert (row.reference, row.target, row.margin) == (8, 8, 1.5)
        assert row.reach == pytest.approx(REACH * SIGMA)
        assert row.reason == "1.5 below token 4 by the port's own logits, noise reaches 0.8"


class TestRows:
    """Two prompts with noise of their own."""

    NOISE = torch.tensor([0.0] * 10 + [0.0, 1.0, 2.0] + [3.0] * 8)
    PLACES = torch.tensor(
        [[1, position] for position in range(10)] + [[0, position] for position in range(11)]
    )

    def test_each_is_held_against_the_noise_behind_its_own_prompt(self) -> None:
        two = replace(GOLDEN, rows=GOLDEN.rows * 2)
        target = replace(port(7, 5), rows=port(7, 5).rows * 2)
        first, second = compare_generated(two, target, noise=self.NOISE, places=self.PLACES)
        assert (first.row, first.status, first.reach) == (0, SiteStatus.PASS, REACH * 3.0)
        assert (second.row, second.status, second.reach) == (1, SiteStatus.FAIL, 0.0)

    def test_noise_without_places_and_the_reverse_tell_nothing(self) -> None:
        for noise, places in ((self.NOISE, None), (None, self.PLACES)):
            [row] = compare_generated(GOLDEN, port(7, 5), noise=noise, places=places)
            assert (row.status, row.reach) == (SiteStatus.NOT_JUDGED, None)

    def test_noise_is_that_of_nearly_all_tokens_of_the_prompt(self) -> None:
        noise = torch.arange(101.0)
        places = torch.stack((torch.zeros(101), torch.arange(101)), dim=1).long()
        [row] = compare_generated(GOLDEN, port(7, 5), noise=noise, places=places)
        assert row.reach == REACH * 95.0

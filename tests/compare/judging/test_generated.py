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


def port(*tokens: int) -> Generation:
    row = Continuation(prompt_ids=(1, 2), generated_ids=tokens, text=None)
    return Generation(rows=(row,), sampling={"do_sample": False})


def compare(target: Generation, *, golden: Generation = GOLDEN, noise: float | None = SIGMA) -> GeneratedRow:
    places = torch.tensor([[0, 0], [0, 1]])
    size = None if noise is None else torch.full((2,), noise)
    [row] = compare_generated(golden, target, noise=size, places=None if noise is None else places)
    return row


def test_same_tokens_pass() -> None:
    row = compare(port(7, 8))
    assert (row.status, row.num_alike, row.num_compared, row.reference) == (SiteStatus.PASS, 2, 2, None)


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
    bare = replace(GOLDEN, rows=(replace(GOLDEN.rows[0], likeliest=()),))
    for row in (compare(port(7, 5), golden=bare), compare(port(7, 5), noise=None)):
        assert row.status is SiteStatus.NOT_JUDGED
        assert row.reason == "the golden does not tell how close the choice was"
    drawn = replace(GOLDEN, sampling={"do_sample": True})
    assert compare(port(7, 5), golden=drawn).reason == "the golden drew its tokens"
    assert compare(port(7, 8), golden=drawn).status is SiteStatus.NOT_JUDGED


def test_shorter_text_is_compared_as_far_as_it_goes() -> None:
    row = compare(port(7))
    assert (row.status, row.num_alike, row.num_compared) == (SiteStatus.PASS, 1, 1)


class TestOwnLogits:
    """A token must be what the port's own logits choose."""

    @staticmethod
    def logits(best: int) -> torch.Tensor:
        logits = torch.linspace(0.0, 1.0, 10)
        logits[best] = 5.0
        return logits[None]

    def compare(
        self, *tokens: int, best: int, golden: Generation = GOLDEN, do_sample: bool = False
    ) -> GeneratedRow:
        noise, places = torch.full((2,), SIGMA), torch.tensor([[0, 0], [0, 1]])
        first = FirstLogits(reference=self.logits(7), target=self.logits(best))
        target = replace(port(*tokens), sampling={"do_sample": do_sample})
        [row] = compare_generated(golden, target, noise=noise, places=places, first=first)
        return row

    def test_the_likeliest_passes(self) -> None:
        assert self.compare(7, 8, best=7).status is SiteStatus.PASS

    def test_another_fails_though_it_is_the_goldens(self) -> None:
        row = self.compare(7, 8, best=2)
        assert (row.status, row.num_alike, row.target) == (SiteStatus.FAIL, 0, 7)
        assert row.reason == "4.22 below token 2 by the port's own logits, noise reaches 0.8"

    def test_what_was_drawn_is_not_held_against_them(self) -> None:
        assert self.compare(7, 8, best=2, do_sample=True).status is SiteStatus.PASS

    def test_golden_without_alternatives_is_judged_at_the_first_token(self) -> None:
        bare = replace(GOLDEN, rows=(replace(GOLDEN.rows[0], likeliest=()),))
        row = self.compare(3, 8, best=3, golden=bare)
        assert (row.status, row.margin) == (SiteStatus.FAIL, pytest.approx(5.0 - 3.0 / 9.0))


class TestFirst:
    """Candidates of the first token, from the logits behind the prompt, where a row kept none."""

    @staticmethod
    def first(golden: int, port: int) -> FirstLogits:
        sides = []
        for best in (golden, port):
            logits = torch.zeros(1, 10)
            logits[0, best] = 5.0
            sides.append(logits)
        return FirstLogits(reference=sides[0], target=sides[1])

    def compare(
        self,
        target: Generation,
        *,
        golden: Generation = GOLDEN,
        first: FirstLogits,
        noise: float | None = SIGMA,
    ) -> GeneratedRow:
        places = torch.tensor([[0, 0], [0, 1]])
        size = None if noise is None else torch.full((2,), noise)
        [row] = compare_generated(golden, target, noise=size, places=places, first=first)
        return row

    def test_a_later_token_is_held_against_the_port_s_own_candidates(self) -> None:
        target = port(7, 8, 9)
        kept = (*LIKELIEST[:1], (Likely(token=4, behind=0.0), Likely(token=8, behind=1.5)), LIKELIEST[0])
        target = replace(target, rows=(replace(target.rows[0], likeliest=kept),))
        row = self.compare(target, first=self.first(7, 7))
        assert (row.status, row.num_alike, row.num_compared) == (SiteStatus.FAIL, 1, 2)
        assert (row.reference, row.target, row.margin) == (8, 8, 1.5)
        assert row.reach == pytest.approx(REACH * SIGMA)
        assert row.reason == "1.5 below token 4 by the port's own logits, noise reaches 0.8"

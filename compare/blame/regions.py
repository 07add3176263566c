"""Whereabouts: what the wrong part of a site has in common, in a sentence or two.

A mistake that nobody has catalogued still has a place: some rows of the batch, positions from one on, the tokens of
an expert, a head, a run of channels (see `place`).
T judged tokens, F channels of a site, H heads of D channels, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from compare.blame.region_text import Place, channel_places, expert_places, range_places, row_places, tightest
from compare.noise.rho import Rows, token_ratios

# The sites' part is a multiple of the golden's where the multiple leaves this share of the error.
_LEFT_BY_SCALE = 0.2
_SAME_HEAD = 0.98
_TINY = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What right ports stay below: ρ of the worst token, and of the worst channel, where it is limited."""

    token: float
    channel: float | None


def describe_whereabouts(
    rows: Rows,
    *,
    bounds: Bounds,
    decoded: torch.Tensor | None,
    experts: torch.Tensor | None,
    head_dim: int | None,
    channel_word: str = "channel",
) -> tuple[str, ...]:
    """Sentences on where the error of a site lies; none where it has no place of its own.

    Args:
        rows: The judged tokens, with their floor.
        bounds: What tells wrong tokens and channels from right ones.
        decoded: Tokens computed one at a time, bool [T]; None where none or all are.
        experts: The experts of each token, [T,k]; None where the site does not hang on them.
        head_dim: D, where the channels are heads side by side.
        channel_word: What one channel is.
    """
    broken = ~rows.target.isfinite().all(dim=1)
    if bool(broken.any()):
        return tuple(_describe_tokens("NaN or Inf", broken, rows.places, decoded=decoded, experts=experts))
    wrong = token_ratios(rows) > bounds.token
    sentences: list[str] = []
    if bool(wrong.any()):
        sentences += _describe_tokens("wrong tokens", wrong, rows.places, decoded=decoded, experts=experts)
    # Where noise hides each token, all of them together still tell which channels are off.
    part = rows.select(wrong) if bool(wrong.any()) else rows
    channels = _wrong_channels(part, bounds)
    if channels is not None and bool(channels.any()):
        found = tightest(channels, channel_places(channels, head_dim, channel_word))
        if found is not None:
            sentences.append(_word(f"wrong {channel_word}s", channels, found.words, found.items))
        sentences += _describe_content(part, channels, head_dim)
    return tuple(sentences)


def _describe_tokens(
    subject: str,
    wrong: torch.Tensor,
    places: torch.Tensor,
    *,
    decoded: torch.Tensor | None,
    experts: torch.Tensor | None,
) -> Iterator[str]:
    def candidates(within: torch.Tensor) -> Iterator[Place]:
        yield from row_places(wrong, places[:, 0])
        yield from range_places(wrong, places[:, 1], within, word="at position")
        if decoded is not None:
            yield Place(words="decoded one at a time", items=decoded, num_choices=1)
            yield Place(words="computed in one pass", items=~decoded, num_choices=1)
        if experts is not None:
            yield from expert_places(wrong, experts, within)

    single = list(candidates(torch.ones_like(wrong)))
    pairs = [
        one & other
        for one in single
        for other in candidates(one.items)
        if other.adds_to(one, wrong) and one.adds_to(other, wrong)
    ]
    found = tightest(wrong, (*single, *pairs))
    if found is not None:
        yield _word(subject, wrong, found.words, found.items)


def _word(subject: str, wrong: torch.Tensor, words: str, items: torch.Tensor) -> str:
    num_wrong, num_there = int(wrong.sum()), int(items.sum())
    share = f"all {num_there}" if num_wrong == num_there else f"{num_wrong} of the {num_there}"
    return f"{subject}: {share} {words}; the {int((~items).sum())} others are right"


def _wrong_channels(rows: Rows, bounds: Bounds) -> torch.Tensor | None:
    """Which channels are off by more than BF16 costs right ones, bool [F]; None where nothing tells."""
    if rows.twin is None or bounds.channel is None or rows.incoming is not None:
        return None
    twin = rows.twin.float()
    error = (rows.target.float() - twin).square().sum(dim=0, dtype=torch.float64)
    floor = (rows.reference.float() - twin).square().sum(dim=0, dtype=torch.float64)
    ratios = (error / floor.clamp(min=max(float(floor.median()), _TINY))).sqrt()
    return ratios > bounds.channel


def _describe_content(rows: Rows, channels: torch.Tensor, head_dim: int | None) -> Iterator[str]:
    """What stands where something is wrong: nothing, a multiple of the golden's, or other heads of it."""
    mine, theirs = rows.reference[:, channels].double(), rows.target[:, channels].double()
    error, size = float((theirs - mine).norm()), float(mine.norm())
    if size <= _TINY or error <= _TINY:
        return
    if not bool(theirs.any()):
        yield "the port's values there are all 0"
        return
    factor = float((theirs * mine).sum()) / size**2
    if float((theirs - factor * mine).norm()) < _LEFT_BY_SCALE * error:
        yield f"the port's values there are {factor:.4g} times the golden's"
    elif head_dim is not None and rows.reference.shape[1] % head_dim == 0:
        moved = _moved_heads(rows, head_dim)
        if moved:
            yield "the port holds " + ", ".join(
                f"in head {place} the golden's head {origin}" for place, origin in moved
            )


def _moved_heads(rows: Rows, head_dim: int) -> list[tuple[int, int]]:
    """Heads of the port that are another of the golden's heads: where each is, and which it is."""
    mine, theirs = (
        torch.nn.functional.normalize(
            side.double().unflatten(-1, (-1, head_dim)).transpose(0, 1).flatten(1), dim=-1
        )
        for side in (rows.reference, rows.target)
    )
    likeness = theirs @ mine.T
    best = likeness.argmax(dim=-1).tolist()
    return [
        (place, origin)
        for place, origin in enumerate(best)
        if origin != place and float(likeness[place, origin]) > _SAME_HEAD
    ]

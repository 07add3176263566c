"""Sentences on where the error of a site lies, and on what the wrong values are.

A token is wrong if its ρ, its error in units of the noise floor (see noise/rho.py), is above a limit.
A region is a named set of tokens or channels; it counts only if chance is unlikely to put all wrong ones into it.
T judged tokens, F channels of a site, D channels of a head, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from compare.blame.regions import (
    Region,
    channel_regions,
    expert_regions,
    range_regions,
    row_regions,
    tightest,
)
from compare.blame.reordering import describe_order
from compare.noise.rho import token_ratios
from compare.noise.rows import Rows
from compare.noise.squared_errors import TINY_FLOAT32
from minimax_tools.results.regions import WrongRegion

# Wrong values are a multiple of the golden's if the multiple leaves at most this share of the error.
_LEFT_BY_SCALE = 0.2
# Two heads hold the same values if their cosine similarity is above this.
_SAME_HEAD = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits above which a token's ρ, and a channel's, is wrong; None for channels that are not limited."""

    token: float
    channel: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tokens:
    """Facts that the judged tokens may have in common."""

    places: torch.Tensor  # row and place in it, int64 [T,2]
    positions: torch.Tensor | None  # int64 [T]; None if they are the places
    decoded: torch.Tensor | None  # tokens that were decoded one at a time, bool [T]
    experts: torch.Tensor | None  # experts of each token, int64 [T,k]
    later_rows: tuple[int, ...]  # rows of the layer's second call; empty if there was one call


def describe_regions(
    rows: Rows,
    *,
    bounds: Bounds,
    decoded: torch.Tensor | None,
    experts: torch.Tensor | None,
    head_dim: int | None,
    positions: torch.Tensor | None = None,
    later_rows: tuple[int, ...] = (),
    channel_word: str = "channel",
) -> tuple[tuple[str, ...], tuple[WrongRegion, ...]]:
    """Describe where the error of a site lies: in sentences, and the regions that they name; none if it is everywhere.

    Args:
        rows: The judged tokens, with their floor.
        bounds: The limits that tell wrong tokens and channels from right ones.
        decoded: Tokens computed one at a time, bool [T]; None if none or all are.
        experts: The experts of each token, [T,k]; None if the site does not depend on them.
        head_dim: D, if the channels are heads side by side; else None.
        positions: Positions of the tokens, int64 [T]; None if each is its token's place in its row.
        later_rows: Rows of the layer's second call; empty if it was called once.
        channel_word: The noun for one channel.
    """
    tokens = _Tokens(
        places=rows.places, positions=positions, decoded=decoded, experts=experts, later_rows=later_rows
    )
    broken = ~rows.target.isfinite().all(dim=1)
    if bool(broken.any()):
        return _tell([("NaN or Inf", broken, _find_tokens(broken, tokens))])
    ratios = token_ratios(rows)
    wrong = ratios > bounds.token
    found: list[tuple[str, torch.Tensor, Region | None]] = []
    values: tuple[str, ...] = ()
    if bool(wrong.any()):
        # The limit of one token is far above right ones, and an error may be small in many tokens: those that are half
        # way to it, as factors go, are wrong too.
        off = ratios > min(bounds.token, bounds.token**0.5)
        for items in (off, wrong):
            region = _find_tokens(items, tokens)
            if region is not None:
                found.append(("wrong tokens", items, region))
                break
        order = describe_order(rows, head_dim, channel_word)
        if order is not None:
            sentences, regions = _tell(found)
            return (*sentences, order), regions
    # The channels are found in the wrong tokens. If no single token is wrong, all of them may still tell.
    rows = rows.select(wrong) if bool(wrong.any()) else rows
    channels = _wrong_channels(rows, bounds)
    if channels is not None and bool(channels.any()):
        region = tightest(channels, channel_regions(channels, head_dim, channel_word))
        found.append((f"wrong {channel_word}s", channels, region))
        values = tuple(_describe_values(rows, channels, head_dim))
    sentences, regions = _tell(found)
    return (*sentences, *values), regions


def _tell(
    found: Iterable[tuple[str, torch.Tensor, Region | None]],
) -> tuple[tuple[str, ...], tuple[WrongRegion, ...]]:
    """Return sentences and regions of subjects, with their wrong items and the region that holds these, if any."""
    told = [(subject, wrong, region) for subject, wrong, region in found if region is not None]
    return (
        tuple(_describe_share(subject, wrong, region) for subject, wrong, region in told),
        tuple(region.as_result(wrong) for _, wrong, region in told),
    )


def _find_tokens(wrong: torch.Tensor, tokens: _Tokens) -> Region | None:
    """Find the smallest region that holds the wrong tokens, or an intersection of two; None if none tells."""

    def candidates(within: torch.Tensor) -> Iterator[Region]:
        """Yield regions that narrow down the tokens `within`, bool [T]."""
        yield from row_regions(wrong, tokens.places[:, 0])
        if tokens.later_rows:
            # A kind of one region.
            yield Region(
                words=f"in rows {', '.join(map(str, tokens.later_rows))}, the second call of the layer",
                items=torch.isin(tokens.places[:, 0], torch.tensor(tokens.later_rows)),
                num_choices=1,
                numbers={"rows": tokens.later_rows},
            )
        yield from range_regions(wrong, tokens.places[:, 1], within, word="at token", kind="tokens")
        if tokens.positions is not None:
            yield from range_regions(wrong, tokens.positions, within, word="at position", kind="positions")
        if tokens.decoded is not None:
            # A kind of one region each.
            yield Region(
                words="decoded one at a time",
                items=tokens.decoded,
                num_choices=1,
                numbers={"is_decoded": True},
            )
            yield Region(
                words="computed in one pass",
                items=~tokens.decoded,
                num_choices=1,
                numbers={"is_decoded": False},
            )
        if tokens.experts is not None:
            yield from expert_regions(wrong, tokens.experts, within)

    single = list(candidates(torch.ones_like(wrong)))
    pairs = [
        first & second
        for first in single
        for second in candidates(first.items)
        if second.adds_to(first, wrong) and first.adds_to(second, wrong)
    ]
    return tightest(wrong, (*single, *pairs))


def _describe_share(subject: str, wrong: torch.Tensor, region: Region) -> str:
    num_wrong = int(wrong.sum())
    share = f"all {num_wrong}" if num_wrong == region.size else f"{num_wrong} of the {region.size}"
    return f"{subject}: {share} {region.words}; the {wrong.numel() - region.size} others are right"


def _wrong_channels(rows: Rows, bounds: Bounds) -> torch.Tensor | None:
    """Find channels whose ρ is above its limit, bool [F].

    None without a twin or a limit on channels, and if the layer inherits an error.
    """
    if rows.twin is None or bounds.channel is None or rows.input_error is not None:
        return None
    twin = rows.twin.float()
    error = (rows.target.float() - twin).square().sum(dim=0, dtype=torch.float64)
    floor = (rows.reference.float() - twin).square().sum(dim=0, dtype=torch.float64)
    # A channel whose own floor is below the median channel's is judged by the median.
    ratios = (error / floor.clamp(min=max(float(floor.median()), TINY_FLOAT32))).sqrt()
    return ratios > bounds.channel


def _describe_values(rows: Rows, channels: torch.Tensor, head_dim: int | None) -> Iterator[str]:
    """Describe the wrong values, if they are zeros, a multiple of the golden's, or other heads of the golden."""
    golden, port = rows.reference[:, channels].double(), rows.target[:, channels].double()
    error, size = float((port - golden).norm()), float(golden.norm())
    if size <= TINY_FLOAT32 or error <= TINY_FLOAT32:
        return
    if not bool(port.any()):
        yield "the port's values there are all 0"
        return
    factor = float((port * golden).sum()) / size**2
    if float((port - factor * golden).norm()) < _LEFT_BY_SCALE * error:
        yield f"the port's values there are {factor:.4g} times the golden's"
    elif head_dim is not None and rows.reference.shape[1] % head_dim == 0:
        moved = _moved_heads(rows, head_dim)
        if moved:
            yield "the port holds " + ", ".join(
                f"in head {head} the golden's head {origin}" for head, origin in moved
            )


def _moved_heads(rows: Rows, head_dim: int) -> list[tuple[int, int]]:
    """Find heads of the port that hold another head of the golden: pairs of the port's head and the golden's."""
    # One vector for each head, its values at all tokens, scaled to length 1.
    golden, port = (
        torch.nn.functional.normalize(
            side.double().unflatten(-1, (-1, head_dim)).transpose(0, 1).flatten(1), dim=-1
        )
        for side in (rows.reference, rows.target)
    )
    likeness = port @ golden.T
    best = likeness.argmax(dim=-1).tolist()
    return [
        (head, origin)
        for head, origin in enumerate(best)
        if origin != head and float(likeness[head, origin]) > _SAME_HEAD
    ]

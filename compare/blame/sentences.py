"""Sentences on where the error of a site lies, and on what the wrong values are.

Tokens or channels are told to be wrong, and an order of the right values to be another, only if that explains the port.
T judged tokens, F channels of a site, D channels of a head, S tokens of a row, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from compare.blame.regions import (
    MOST_LISTED,
    Region,
    TokenList,
    channel_regions,
    expert_regions,
    find_scale,
    likeliest,
    list_channels,
    range_regions,
    row_regions,
    step_regions,
)
from compare.limits.limits import FEWEST_FOR_STRUCTURE
from compare.noise.rho import noise_ratio, token_ratios
from compare.noise.rows import TINY_FLOAT32, Rows
from minimax_tools.results.results import WrongRegion
from reports.wording import word_figure, word_order

# Share of the error that an order may leave. Right values in their order leave the noise, which is below a hundredth;
# neighbouring tokens of a stream are alike, and leave more than half.
_MOST_LEFT = 0.1
# Two channels, or tokens, hold the same values if their cosine similarity is above this.
_SAME = 0.98
# Share of the channels that must be found elsewhere: a few may be as good as constant.
_LEAST_FOUND = 0.95
# With fewer tokens, channels resemble each other by chance. With more channels the matrix of all pairs is too large.
_FEWEST_TOKENS, _MOST_CHANNELS = 16, 8192


def describe_order(rows: Rows, head_dim: int | None, channel_word: str = "channel") -> str | None:
    """Describe the order in which a site holds the golden's values; None if it is the right one, or not known."""
    golden, port = rows.reference.float(), rows.target.float()
    error = float((port - golden).norm())
    if rows.num_tokens < _FEWEST_TOKENS or error <= TINY_FLOAT32:
        return None
    for words, order in _plain_orders(golden, rows.places, head_dim):
        is_known = order.isfinite().all(dim=1)
        # An order of some rows must explain these.
        left, before = float((port - order)[is_known].norm()), float((port - golden)[is_known].norm())
        if before > _MOST_LEFT * error and left <= _MOST_LEFT * before:
            return f"the port holds the right values in another order: {words}"
    channels = _match_channels(golden, port)
    if channels is None or (head_dim is not None and _moves_heads(channels, head_dim)):
        return None
    if float((port - golden[:, channels]).norm()) > _MOST_LEFT * error:
        return None
    return (
        f"the port holds the right values in another order: {word_order(channels, noun=f'{channel_word}s')}"
    )


def _plain_orders(
    golden: torch.Tensor, places: torch.Tensor, head_dim: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield orders in words with the golden's values [T,F] in that order; NaN in tokens whose values are not known."""
    width = golden.shape[1]
    if head_dim is not None and width % head_dim == 0 and width > head_dim:
        yield "heads and tokens are not transposed", _not_transposed(golden, places, head_dim)
        heads = golden.unflatten(1, (-1, head_dim))
        yield "heads and their dims are transposed", heads.transpose(1, 2).flatten(1)
        yield "the dims of each head are reversed", heads.flip(-1).flatten(1)
        if head_dim % 2 == 0:
            yield "the halves of each head are exchanged", heads.roll(head_dim // 2, dims=-1).flatten(1)
    yield "the tokens of each row are reversed", _by_row(golden, places, shift=None)
    for shift in (1, -1):
        towards = "later" if shift > 0 else "earlier"
        yield f"each token holds the values of the one {towards}", _by_row(golden, places, shift=shift)


def _not_transposed(golden: torch.Tensor, places: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rows of full length as [heads, S, D] read as [S, heads, D]; other rows lack their padding."""
    order = torch.full_like(golden, torch.nan)
    length = int(places[:, 1].max()) + 1
    for row in places[:, 0].unique().tolist():
        tokens = (places[:, 0] == row).nonzero().flatten()
        if len(tokens) == length:
            heads = golden[tokens].unflatten(1, (-1, head_dim)).transpose(0, 1)
            order[tokens] = heads.reshape(length, -1)
    return order


def _by_row(golden: torch.Tensor, places: torch.Tensor, *, shift: int | None) -> torch.Tensor:
    """Return the tokens of each row reversed, or those `shift` later; NaN beyond the row's ends."""
    order = torch.full_like(golden, torch.nan)
    for row in places[:, 0].unique().tolist():
        tokens = (places[:, 0] == row).nonzero().flatten()
        if shift is None:
            order[tokens] = golden[tokens.flip(0)]
        elif len(tokens) > abs(shift):
            here, there = (
                (tokens[:-shift], tokens[shift:]) if shift > 0 else (tokens[-shift:], tokens[:shift])
            )
            order[here] = golden[there]
    return order


def _match_channels(golden: torch.Tensor, port: torch.Tensor) -> list[int] | None:
    """Return the golden's channel that each channel of the port holds; None if too many hold none, or one twice."""
    if golden.shape[1] > _MOST_CHANNELS:
        return None
    one, other = (torch.nn.functional.normalize(side, dim=0) for side in (port, golden))
    likeness, origins = (one.T @ other).max(dim=1)
    is_found = likeness > _SAME
    origins = torch.where(is_found, origins, torch.arange(len(origins)))
    is_order = len(origins.unique()) == len(origins)
    if not is_order or float(is_found.float().mean()) < _LEAST_FOUND:
        return None
    channels: list[int] = origins.tolist()
    return channels if channels != sorted(channels) else None


def _moves_heads(channels: list[int], head_dim: int) -> bool:
    """Decide whether whole heads have changed places, which has words of its own."""
    heads = torch.tensor(channels).unflatten(0, (-1, head_dim))
    return bool(
        (heads - heads[:, :1] == torch.arange(head_dim)).all() and (heads[:, 0] % head_dim == 0).all()
    )


# Wrong values are a multiple of the golden's if the multiple leaves at most this share of the error.
_LEFT_BY_SCALE = 0.2
# Two heads hold the same values if their cosine similarity is above this.
_SAME_HEAD = 0.98
# Others that are not right are told apart if their error is at most this share of the wrong ones'.
_FAR_BELOW = 0.1
# Least ratio of the ρ of a wrong token to that of every other, if nothing but their ρ tells them apart.
_FAR_APART = 1.5
# Least ρ of all tokens to say that none is near the floor.
_FAR_ABOVE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits above which a token's ρ, and a channel's, is wrong; None for channels that are not limited."""

    token: float
    channel: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFacts:
    """Facts that wrong tokens may have in common, beside their places."""

    positions: torch.Tensor | None = None  # int64 [T]; None if they are the places
    decoded: torch.Tensor | None = (
        None  # tokens that were decoded one at a time, bool [T]; None if all or none were
    )
    experts: torch.Tensor | None = (
        None  # experts of each token, int64 [T,k]; None if the site depends on none
    )
    later_rows: tuple[int, ...] = ()  # rows of the layer's second call; empty if there was one call


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Place of a site's error, and what its wrong values are; empty if it is everywhere, and nothing is known."""

    sentences: tuple[str, ...] = ()
    regions: tuple[WrongRegion, ...] = ()  # the tokens and channels that the sentences name
    tokens: tuple[tuple[int, int], ...] = ()  # row and place of each wrong token, if they are few

    def __add__(self, other: Where) -> Where:
        """Return both, the sentences of this one first."""
        return Where(
            sentences=self.sentences + other.sentences,
            regions=self.regions + other.regions,
            tokens=self.tokens + other.tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """The wrong tokens or channels of a site, bool [T] or [F]."""

    wrong: torch.Tensor
    region: Region | None = None  # a region that holds them; None to list them
    others: str = "right"  # what those outside the region, or the list, are

    @property
    def held(self) -> torch.Tensor:
        """The tokens or channels of the region or the list, bool."""
        return self.wrong if self.region is None else self.region.items

    @property
    def others_in_words(self) -> str:
        """The number of the others, and what they are."""
        return f"the {len(self.wrong) - int(self.held.sum())} others are {self.others}"


IsRight = Callable[[Rows], bool]


def describe_regions(
    rows: Rows,
    *,
    bounds: Bounds,
    is_right: IsRight,
    facts: TokenFacts,
    head_dim: int | None,
    channel_word: str = "channel",
) -> Where:
    """Describe where the error of a site lies.

    Args:
        rows: The judged tokens, with their floor.
        bounds: The limits that tell wrong tokens and channels from right ones.
        is_right: Decides whether some tokens, or channels, of the site pass.
        facts: Facts that wrong tokens may have in common.
        head_dim: D, if the channels are heads side by side; else None.
        channel_word: The noun for one channel.
    """
    broken = ~rows.target.isfinite().all(dim=1)
    if bool(broken.any()):
        region = likeliest(broken, _token_regions(broken, rows.places, facts))
        return _tell_tokens("NaN or Inf", _Part(wrong=broken, region=region, others="finite"), rows)
    ratios = token_ratios(rows)
    tokens = _find_wrong_tokens(rows, ratios, bounds, is_right, facts)
    where = Where() if tokens is None else _tell_tokens("wrong tokens", tokens, rows)
    order = describe_order(rows, head_dim, channel_word) if bool((ratios > bounds.token).any()) else None
    if order is not None:
        return where + Where(sentences=(order,))
    within = rows if tokens is None else rows.select(tokens.wrong)
    # A few tokens are each off in channels of their own: what these have in common is chance.
    if tokens is None or within.num_tokens >= FEWEST_FOR_STRUCTURE:
        channels = _find_wrong_channels(within, bounds, is_right, head_dim, channel_word)
        if channels is not None:
            values = _describe_values(within, channels.wrong, head_dim)
            return where + _tell_channels(channels, channel_word) + Where(sentences=tuple(values))
    if tokens is not None:
        everywhere = torch.ones(rows.reference.shape[1], dtype=torch.bool)
        return where + Where(sentences=tuple(_describe_values(within, everywhere, head_dim)))
    if is_right(rows):
        # It is to blame for another site's sake, and nothing sticks out of the noise.
        return where
    scale = find_scale(rows, head_dim=head_dim, is_right=is_right, channel_word=channel_word)
    if scale is not None:
        return Where(sentences=(str(scale),))
    worse = _find_worse_tokens(rows, ratios > bounds.token, facts)
    return _tell_least(ratios) if worse is None else _tell_tokens("wrong tokens", worse, rows)


def _tell_least(ratios: torch.Tensor) -> Where:
    """Say of an error that is everywhere how large it is at least, if that is far above the noise."""
    least = float(ratios.min())
    if least <= _FAR_ABOVE:
        return Where()
    return Where(sentences=(f"no token is near the floor: the best has ρ {word_figure(least)}",))


def _find_wrong_tokens(
    rows: Rows, ratios: torch.Tensor, bounds: Bounds, is_right: IsRight, facts: TokenFacts
) -> _Part | None:
    # The limit of one token is far above right ones, and an error may be small in many tokens: those that are half way
    # to it, as factors go, are wrong too, if they have something in common, or if all others are far below them.
    off, wrong = ratios > min(bounds.token, bounds.token**0.5), ratios > bounds.token
    for items, may_list in ((off, False), (_far_above_others(ratios, off), True), (wrong, True)):
        regions = _token_regions(items, rows.places, facts)
        part = _find_part(items, regions, lambda others: is_right(rows.select(others)), may_list=may_list)
        if part is not None:
            return part
    return None


def _find_part(
    wrong: torch.Tensor,
    regions: Iterable[Region],
    are_right: Callable[[torch.Tensor], bool],
    *,
    may_list: bool,
) -> _Part | None:
    """Find how to tell wrong items, bool [T] or [F], so that the others are right; None if they are not, or no way is.

    By the likeliest region; or by a list, if there are few, or no region: not if most are wrong, since it would rather
    say which are right.
    """
    if not bool(wrong.any()):
        return None
    num_wrong, region = int(wrong.sum()), likeliest(wrong, regions)
    ways: list[Region | None] = [] if region is None else [region]
    if (may_list and num_wrong <= len(wrong) // 2) or ways:
        prefers_list = num_wrong <= MOST_LISTED and (region is None or region.is_of_places)
        ways = [None, *ways] if prefers_list else [*ways, None]
    parts = (_Part(wrong=wrong, region=way) for way in ways)
    return next((part for part in parts if not part.held.all() and are_right(~part.held)), None)


def _far_above_others(ratios: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """Find the most tokens of those that are `off`, bool [T], whose ρ [T] is far above that of all others; or none."""
    ordered = ratios.sort(descending=True)
    gaps = (ordered.values[:-1] >= _FAR_APART * ordered.values[1:]).nonzero().flatten()
    counts = [int(gap) + 1 for gap in gaps if int(gap) < int(off.sum())]
    found = torch.zeros_like(off)
    found[ordered.indices[: max(counts, default=0)]] = True
    return found


def _find_worse_tokens(rows: Rows, wrong: torch.Tensor, facts: TokenFacts) -> _Part | None:
    """Find wrong tokens whose error is far beyond that of the others, which are not right either; None without any."""

    def are_far_below(others: torch.Tensor) -> bool:
        of_others, of_wrong = (noise_ratio(rows.select(items)).whole for items in (others, ~others))
        return of_others <= _FAR_BELOW * of_wrong

    part = _find_part(wrong, _token_regions(wrong, rows.places, facts), are_far_below, may_list=True)
    if part is None:
        return None
    return replace(part, others=f"at ρ {word_figure(noise_ratio(rows.select(~part.held)).whole)}")


def _find_wrong_channels(
    rows: Rows, bounds: Bounds, is_right: IsRight, head_dim: int | None, channel_word: str
) -> _Part | None:
    """Find the channels without which a site is right; None without any, and if nothing tells."""
    if rows.twin is None or bounds.channel is None or rows.input_error is not None:
        return None
    twin = rows.twin.float()
    error = (rows.target.float() - twin).square().sum(dim=0, dtype=torch.float64)
    floor = (rows.reference.float() - twin).square().sum(dim=0, dtype=torch.float64)
    # A channel whose own floor is below the median channel's is judged by the median.
    ratios = (error / floor.clamp(min=max(float(floor.median()), TINY_FLOAT32))).sqrt()
    wrong = ratios > bounds.channel
    return _find_part(
        wrong,
        channel_regions(wrong, head_dim, channel_word),
        lambda others: is_right(rows.of_channels(others)),
        may_list=int(wrong.sum()) <= MOST_LISTED,
    )


def _tell_tokens(subject: str, part: _Part, rows: Rows) -> Where:
    num_wrong, places = int(part.wrong.sum()), rows.places[part.wrong].tolist()
    few = tuple((row, token) for row, token in places) if num_wrong <= MOST_LISTED else ()
    if part.region is not None:
        return replace(_tell_region(subject, part), tokens=few)
    listed = TokenList.of(places)
    count = "" if listed.size <= MOST_LISTED else f"{num_wrong} of {len(part.wrong)}, "
    found = listed.region(of=len(part.wrong))
    return Where(
        sentences=(f"{subject}: {count}{listed}; {part.others_in_words}",),
        regions=() if found is None else (found,),
        tokens=few,
    )


def _tell_channels(part: _Part, channel_word: str) -> Where:
    if part.region is not None:
        return _tell_region(f"wrong {channel_word}s", part)
    words, found = list_channels(part.wrong, channel_word)
    return Where(sentences=(f"wrong {words}; {part.others_in_words}",), regions=(found,))


def _tell_region(subject: str, part: _Part) -> Where:
    region, num_wrong = part.region, int(part.wrong.sum())
    assert region is not None, "a list is told otherwise"
    share = f"all {num_wrong}" if num_wrong == region.size else f"{num_wrong} of the {region.size}"
    sentence = f"{subject}: {share} {region.words}; {part.others_in_words}"
    return Where(sentences=(sentence,), regions=(region.as_result(part.wrong),))


def _token_regions(wrong: torch.Tensor, places: torch.Tensor, facts: TokenFacts) -> Iterator[Region]:
    """Yield regions that hold the wrong tokens, and intersections of two that narrow each other down."""

    def candidates(within: torch.Tensor) -> Iterator[Region]:
        """Yield regions that narrow down the tokens `within`, bool [T]."""
        yield from row_regions(wrong, places[:, 0])
        if facts.later_rows:
            # A kind of one region.
            yield Region(
                words=f"in rows {', '.join(map(str, facts.later_rows))}, the second call of the layer",
                items=torch.isin(places[:, 0], torch.tensor(facts.later_rows)),
                num_choices=1.0,
                numbers={"rows": facts.later_rows},
            )
        yield from range_regions(wrong, places[:, 1], within, word="at token", kind="tokens")
        yield from step_regions(wrong, places[:, 1], within)
        if facts.positions is not None:
            yield from range_regions(wrong, facts.positions, within, word="at position", kind="positions")
        if facts.decoded is not None:
            # A kind of one region each.
            for words, items in (
                ("decoded one at a time", facts.decoded),
                ("computed in one pass", ~facts.decoded),
            ):
                numbers = {"is_decoded": items is facts.decoded}
                yield Region(words=words, items=items, num_choices=1.0, numbers=numbers)
        if facts.experts is not None:
            yield from expert_regions(wrong, facts.experts, within)

    single = list(candidates(torch.ones_like(wrong)))
    yield from single
    for first in single:
        for second in candidates(first.items):
            if second.adds_to(first, wrong) and first.adds_to(second, wrong):
                yield first & second


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

"""Regions: named sets of tokens or channels that may hold all wrong ones; scales: constant factors on a site.

A region counts only if chance is unlikely to put all wrong items into one as small. `wrong` always holds at least one
item; `within` holds the items of a region that a new one shall narrow down, or all.
T judged tokens, F channels of a site, D channels of a head, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch

from compare.noise.rows import TINY_FLOAT32, Rows
from minimax_tools.errors import number_ranges, word_ranges
from minimax_tools.results.results import WrongRegion
from reports.wording import word_figure, word_ordinal

# With fewer tokens, a factor for each channel explains noise. With fewer channels, one for each token does.
_FEWEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Factors on the golden's values that leave no more than noise."""

    of: str  # what has a factor of its own: `head`, `channel`, `token`; empty for one factor
    factors: torch.Tensor  # float32, broadcasts with [T,F]

    def __str__(self) -> str:
        least, most = (float(factor) for factor in (self.factors.min(), self.factors.max()))
        if not self.of:
            return f"the port's values are {least:.4g} times the golden's"
        first, last = word_figure(least), word_figure(most)
        if first == last:
            return f"the port's values are about {first} times the golden's"
        return f"each {self.of} is a multiple of the golden's, {first} to {last} times"


def find_scale(
    rows: Rows, *, head_dim: int | None, is_right: Callable[[Rows], bool], channel_word: str = "channel"
) -> Scale | None:
    """Find the factors, as few as possible, without which the port's values are right; None if there are none."""
    for scale in _scales(rows, head_dim, channel_word):
        is_usable = bool((scale.factors.isfinite() & (scale.factors.abs() > TINY_FLOAT32)).all())
        if is_usable and is_right(unscaled(rows, scale)):
            return scale
    return None


def unscaled(rows: Rows, scale: Scale) -> Rows:
    """Return the rows with the port's values divided by their factors."""
    # Not rounded: a second rounding would add as much noise as the first.
    return replace(rows, target=rows.target.float() / scale.factors, errors=None)


def _scales(rows: Rows, head_dim: int | None, channel_word: str) -> Iterator[Scale]:
    golden, port = rows.reference.float(), rows.target.float()
    num_tokens, num_channels = golden.shape
    yield Scale(of="", factors=_fit(golden, port, (0, 1)))
    if num_tokens >= _FEWEST:
        if head_dim is not None and num_channels % head_dim == 0:
            of_heads, of_port = (side.unflatten(1, (-1, head_dim)) for side in (golden, port))
            factors = _fit(of_heads, of_port, (0, 2))
            yield Scale(of="head", factors=factors.expand(1, -1, head_dim).flatten(1))
        yield Scale(of=channel_word, factors=_fit(golden, port, (0,)))
    if num_channels >= _FEWEST:
        yield Scale(of="token", factors=_fit(golden, port, (1,)))


def _fit(golden: torch.Tensor, port: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Fit factors on the golden's values by least squares over some dims, which are kept with a size of 1."""
    products = (port * golden).sum(dim=dims, keepdim=True)
    return products / golden.square().sum(dim=dims, keepdim=True).clamp(min=TINY_FLOAT32)


# A region counts if chance would put all wrong items into one as small with less than this probability.
_CHANCE = 1e-6
# A region narrows down another if chance would put the other's wrong items into it with less than this probability.
_CHANCE_WITHIN = 1e-3
# A region that holds more than this share of all items says nothing, unless as many as these lie outside: the first 16
# tokens of a long prompt that are right say where the mistake begins.
_MOST_OF_ALL = 0.9
_FEWEST_OUTSIDE = 8
# So many wrong tokens, or channels, are listed.
MOST_LISTED = 12
# Fewest numbers with equal steps that make a rule.
_FEWEST_STEPS = 3
# A region names at most one expert in so many.
_EXPERTS_PER_NAMED = 4
# Fields of `WrongRegion` that list single numbers; the others list ranges.
_LISTED = {"rows", "experts", "heads"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """A named subset of the tokens or channels."""

    words: str  # the region in words, such as `at tokens from 7 on`
    items: torch.Tensor  # the tokens or channels that it holds, bool [T] or [F]
    # At least the number of regions of that kind that might have been found instead: for rows, heads and experts those
    # of that size, for ranges those of any size.
    num_choices: float
    numbers: Mapping[str, Any] = field(default_factory=dict)  # the region as fields of `WrongRegion`

    @property
    def size(self) -> int:
        """Number of items that the region holds."""
        return int(self.items.sum())

    @property
    def is_of_places(self) -> bool:
        """True if it says no more than a list of rows and tokens."""
        return self.numbers.keys() <= {"rows", "tokens", "every"}

    def __and__(self, other: Region) -> Region:
        """Return the intersection of two regions of different kinds."""
        return Region(
            words=f"{self.words}, {other.words}",
            items=self.items & other.items,
            num_choices=self.num_choices * other.num_choices,
            numbers={**self.numbers, **other.numbers},
        )

    def as_result(self, wrong: torch.Tensor) -> WrongRegion:
        """Return the region as numbers, with the count of wrong items, bool [T] or [F]."""
        return WrongRegion(num_wrong=int(wrong.sum()), num_held=self.size, of=wrong.numel(), **self.numbers)

    def adds_to(self, other: Region, wrong: torch.Tensor) -> bool:
        """Decide whether this region narrows down the wrong items, bool [T] or [F], within another."""
        items = other.items
        return _log_chance(wrong[items], self.items[items], self.num_choices) < math.log(_CHANCE_WITHIN)


@dataclass(frozen=True, kw_only=True)
class TokenList:
    """Tokens as numbers. `str()` lists a dozen, such as `row 0: 31, 63, 95: every 32nd`, and counts the others."""

    groups: tuple[
        tuple[tuple[int, ...], tuple[int, ...]], ...
    ]  # rows, and tokens of each of these; both ascending

    @classmethod
    def of(cls, places: Iterable[Sequence[int]]) -> TokenList:
        """List tokens, each a row and a place in it."""
        tokens: dict[int, list[int]] = {}
        for row, token in places:
            tokens.setdefault(row, []).append(token)
        rows: dict[tuple[int, ...], list[int]] = {}
        for row in sorted(tokens):
            rows.setdefault(tuple(sorted(tokens[row])), []).append(row)
        return cls(groups=tuple((tuple(alike), of_rows) for of_rows, alike in rows.items()))

    @property
    def size(self) -> int:
        """Number of single tokens and ranges that are listed."""
        return sum(len(number_ranges(tokens)) for _, tokens in self.groups)

    @cached_property
    def rule(self) -> tuple[int, int, bool] | None:
        """The first token, the step from each to the next, and whether none is left out; None if that may be chance."""
        numbers = sorted({token for _, tokens in self.groups for token in tokens})
        step = math.gcd(*(number - numbers[0] for number in numbers))
        if len(numbers) < _FEWEST_STEPS or step < 2:
            return None
        steps = {later - earlier for _, tokens in self.groups for earlier, later in pairwise(tokens)}
        is_whole = steps == {step}
        return (
            (numbers[0], step, is_whole) if is_whole or step ** (1 - len(numbers)) < _CHANCE_WITHIN else None
        )

    def region(self, *, of: int) -> WrongRegion | None:
        """Return the list as a region of so many judged tokens; None if rows have other tokens than others."""
        if len(self.groups) > 1:
            return None
        rows, tokens = self.groups[0]
        num_wrong = len(rows) * len(tokens)
        return WrongRegion(
            num_wrong=num_wrong,
            num_held=num_wrong,
            of=of,
            rows=rows,
            tokens=number_ranges(tokens),
            every=self.rule[1] if self.rule is not None and self.rule[2] else None,
        )

    def __str__(self) -> str:
        words, num_left = [], MOST_LISTED
        for rows, tokens in self.groups:
            runs = number_ranges(tokens)[:num_left]
            num_left -= len(runs)
            words += [f"{_count_words('row', rows)}: {', '.join(word_ranges(runs))}"] if runs else []
        more = f" and {self.size - MOST_LISTED} more" if self.size > MOST_LISTED else ""
        return ", and ".join(words) + more + self._rule_in_words

    @property
    def _rule_in_words(self) -> str:
        if self.rule is None:
            return ""
        first, step, is_whole = self.rule
        return (
            f": every {word_ordinal(step)}"
            if is_whole
            else f": each {first % step} plus a multiple of {step}"
        )


def list_channels(wrong: torch.Tensor, word: str) -> tuple[str, WrongRegion]:
    """List wrong channels, bool [F], in words and as a region; `word` is the noun for one."""
    numbers, num_wrong = tuple(wrong.nonzero().flatten().tolist()), int(wrong.sum())
    kind = f"{word}s"
    held: dict[str, Any] = {kind: numbers if kind in _LISTED else number_ranges(numbers)}
    region = WrongRegion(num_wrong=num_wrong, num_held=num_wrong, of=wrong.numel(), **held)
    return _count_words(word, numbers), region


def likeliest(wrong: torch.Tensor, candidates: Iterable[Region]) -> Region | None:
    """Return the region that chance is the least likely to put all wrong items into; None if it may do so with each."""
    chances = [
        (_log_chance(wrong, region.items, region.num_choices), number, region)
        for number, region in enumerate(candidates)
        if region.size <= max(_MOST_OF_ALL * wrong.numel(), wrong.numel() - _FEWEST_OUTSIDE)
    ]
    chance, _, region = min(chances, key=itemgetter(0, 1), default=(0.0, 0, None))
    return region if chance < math.log(_CHANCE) else None


def row_regions(wrong: torch.Tensor, rows: torch.Tensor) -> Iterator[Region]:
    """Yield the region of all batch rows that hold wrong tokens; `rows` [T] are the tokens' rows."""
    held = sorted(set(rows[wrong].tolist()))
    yield Region(
        words="in " + _count_words("row", held),
        items=torch.isin(rows, torch.tensor(held)),
        num_choices=math.comb(int(rows.unique().numel()), len(held)),
        numbers={"rows": tuple(held)},
    )


def range_regions(
    wrong: torch.Tensor, numbers: torch.Tensor, within: torch.Tensor, *, word: str, kind: str
) -> Iterator[Region]:
    """Yield the range from the first wrong number on, and the range from the first to the last.

    Each item has a number, of which `word` is the noun, such as `at token`, and `kind` the field of `WrongRegion`. The
    numbers of the items `within`, bool [T] or [F], tell how many ranges there are to choose from.
    """
    low, high = int(numbers[wrong].min()), int(numbers[wrong].max())
    least, most = int(numbers[within].min()), int(numbers[within].max())
    if low > least:
        yield Region(
            words=f"{word}s from {low} on",
            items=numbers >= low,
            num_choices=float(most - least + 1),
            numbers=_name_range(kind, low, most),
        )
    if high < most:
        words = f"{word} {low}" if low == high else f"{word}s {low} to {high}"
        yield Region(
            words=words,
            items=(numbers >= low) & (numbers <= high),
            num_choices=float(most - least + 1) ** 2,
            numbers=_name_range(kind, low, high),
        )


def step_regions(wrong: torch.Tensor, tokens: torch.Tensor, within: torch.Tensor) -> Iterator[Region]:
    """Yield every so many tokens from the first wrong one on; `tokens` [T] are their places in their rows."""
    held = sorted(set(tokens[wrong].tolist()))
    step = math.gcd(*(number - held[0] for number in held))
    if len(held) < _FEWEST_STEPS or step < 2:
        return
    low, most = held[0], int(tokens[within].max())
    yield Region(
        words=f"at every {word_ordinal(step)} token from {low} on",
        items=(tokens >= low) & ((tokens - low) % step == 0),
        num_choices=float(most + 1) ** 2,
        numbers={"tokens": ((low, most),), "every": step},
    )


def expert_regions(wrong: torch.Tensor, experts: torch.Tensor, within: torch.Tensor) -> Iterator[Region]:
    """Yield a few experts, chosen greedily, of which each wrong token `within`, bool [T], uses one; `experts` is [T,k].

    Nothing is yielded if a quarter of the experts is not enough.
    """
    num_experts = int(experts.max()) + 1
    takes = torch.zeros(experts.shape[0], num_experts, dtype=torch.bool)
    takes.scatter_(1, experts, True)
    uncovered = wrong & within
    chosen: list[int] = []
    while bool(uncovered.any()) and len(chosen) < max(1, num_experts // _EXPERTS_PER_NAMED):
        hits = takes[uncovered].sum(dim=0).double()
        # The expert of most wrong tokens; among equals, the one of fewest right tokens (the fraction is below 1).
        misses = takes[within & ~wrong].sum(dim=0).double()
        chosen.append(int((hits - misses / (takes.shape[0] + 1)).argmax()))
        uncovered = uncovered & ~takes[:, chosen[-1]]
    if not bool(uncovered.any()):
        yield Region(
            words="of " + _count_words("expert", sorted(chosen)),
            items=takes[:, chosen].any(dim=1),
            num_choices=math.comb(num_experts, len(chosen)),
            numbers={"experts": tuple(sorted(chosen))},
        )


def channel_regions(wrong: torch.Tensor, head_dim: int | None, word: str) -> Iterator[Region]:
    """Yield heads and ranges of channels that hold the wrong ones; `word` is the noun for one channel."""
    numbers = torch.arange(wrong.numel())
    if head_dim is not None and wrong.numel() % head_dim == 0:
        yield from _head_regions(wrong, numbers, head_dim)
    yield from range_regions(wrong, numbers, torch.ones_like(wrong), word=f"from {word}", kind=f"{word}s")


def _name_range(kind: str, low: int, high: int) -> dict[str, Any]:
    return {kind: tuple(range(low, high + 1)) if kind in _LISTED else ((low, high),)}


def _log_chance(wrong: torch.Tensor, items: torch.Tensor, num_choices: float) -> float:
    """Return the logarithm of the chance that some region of that size holds all wrong items."""
    if bool((wrong & ~items).any()) or not bool(wrong.any()):
        return 0.0
    num_wrong = int(wrong.sum())
    ways = _log_ways(int(items.sum()), num_wrong) - _log_ways(wrong.numel(), num_wrong)
    return math.log(num_choices) + ways


def _log_ways(total: int, num_chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(num_chosen + 1) - math.lgamma(total - num_chosen + 1)


def _head_regions(wrong: torch.Tensor, numbers: torch.Tensor, head_dim: int) -> Iterator[Region]:
    heads, dims = numbers // head_dim, numbers % head_dim
    held = sorted(set(heads[wrong].tolist()))
    yield Region(
        words="of " + _count_words("head", held),
        items=torch.isin(heads, torch.tensor(held)),
        num_choices=math.comb(wrong.numel() // head_dim, len(held)),
        numbers={"heads": tuple(held)},
    )
    for region in range_regions(wrong, dims, torch.ones_like(wrong), word="in dim", kind="dims"):
        yield replace(region, words=f"{region.words} of each head")


def _count_words(noun: str, numbers: Sequence[int]) -> str:
    """Return ascending numbers in words, such as `heads 0-3, 7`."""
    return (
        f"{noun} {numbers[0]}"
        if len(numbers) == 1
        else f"{noun}s {', '.join(word_ranges(number_ranges(numbers)))}"
    )

"""Regions: where the wrong tokens and channels of a site lie, in a sentence or two.

A mistake that is in no catalogue still has a place: rows of the batch, a range of positions, the tokens of an expert, a
head, a run of channels.
T judged tokens, F channels of a site, H heads of D channels, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from compare.noise.rho import token_ratios
from compare.noise.rows import Rows
from compare.noise.squared_errors import TINY_FLOAT32

# The sites' part is a multiple of the golden's where the multiple leaves this share of the error.
_LEFT_BY_SCALE = 0.2
_SAME_HEAD = 0.98
# A place is told where chance would put all that is wrong into one as small this rarely.
_CHANCE = 1e-6
# A place within another is told where it is this unlikely there.
_CHANCE_WITHIN = 1e-3
# A place that leaves less than this outside says nothing.
_MOST_OF_ALL = 0.9
_MOST_EXPERTS_SHARE = 4  # of all experts, at most a quarter are a place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """A named subset of the tokens or channels.

    Args:
        items: They, bool [T] or [F].
        num_choices: Among how many such places it was found.
    """

    words: str
    items: torch.Tensor
    num_choices: float

    def __and__(self, other: Region) -> Region:
        """Return the intersection of two regions."""
        return Region(
            words=f"{self.words}, {other.words}",
            items=self.items & other.items,
            num_choices=self.num_choices * other.num_choices,
        )

    def adds_to(self, other: Region, wrong: torch.Tensor) -> bool:
        """Decide whether it narrows down the wrong items, bool [T] or [F], within another region."""
        items = other.items
        return _log_chance(wrong[items], self.items[items], self.num_choices) < math.log(_CHANCE_WITHIN)


def tightest(wrong: torch.Tensor, candidates: Iterable[Region]) -> Region | None:
    """Return the smallest region that holds all wrong items, unless that may be chance."""
    best: Region | None = None
    for region in candidates:
        size = int(region.items.sum())
        is_small = size <= _MOST_OF_ALL * wrong.numel() and (best is None or size < int(best.items.sum()))
        if is_small and _log_chance(wrong, region.items, region.num_choices) < math.log(_CHANCE):
            best = region
    return best


def row_regions(wrong: torch.Tensor, rows: torch.Tensor) -> Iterator[Region]:
    """Yield the rows of the batch that hold wrong tokens; `rows` [T] tells each token's."""
    held = sorted(set(rows[wrong].tolist()))
    yield Region(
        words="in " + _count_words("row", held),
        items=torch.isin(rows, torch.tensor(held)),
        num_choices=math.comb(int(rows.unique().numel()), len(held)),
    )


def range_regions(
    wrong: torch.Tensor, numbers: torch.Tensor, within: torch.Tensor, *, word: str
) -> Iterator[Region]:
    """Yield the range from the first wrong number to the last; open where it ends as the numbers do."""
    low, high = int(numbers[wrong].min()), int(numbers[wrong].max())
    least, most = int(numbers[within].min()), int(numbers[within].max())
    if low > least:
        yield Region(
            words=f"{word}s from {low} on", items=numbers >= low, num_choices=float(most - least + 1)
        )
    if high < most:
        words = f"{word} {low}" if low == high else f"{word}s {low} to {high}"
        yield Region(
            words=words,
            items=(numbers >= low) & (numbers <= high),
            num_choices=float(most - least + 1) ** 2,
        )


def expert_regions(wrong: torch.Tensor, experts: torch.Tensor, within: torch.Tensor) -> Iterator[Region]:
    """Yield the fewest experts that all wrong tokens use, chosen greedily."""
    num_experts = int(experts.max()) + 1
    takes = torch.zeros(experts.shape[0], num_experts, dtype=torch.bool)
    takes.scatter_(1, experts, True)
    left = wrong & within
    chosen: list[int] = []
    while bool(left.any()) and len(chosen) < max(1, num_experts // _MOST_EXPERTS_SHARE):
        hits = takes[left].sum(dim=0).double()
        # Of experts that as many wrong tokens need, the one that fewest right tokens have.
        misses = takes[within & ~wrong].sum(dim=0).double()
        chosen.append(int((hits - misses / (takes.shape[0] + 1)).argmax()))
        left = left & ~takes[:, chosen[-1]]
    if not bool(left.any()):
        yield Region(
            words="of " + _count_words("expert", sorted(chosen)),
            items=takes[:, chosen].any(dim=1),
            num_choices=math.comb(num_experts, len(chosen)),
        )


def channel_regions(wrong: torch.Tensor, head_dim: int | None, word: str) -> Iterator[Region]:
    """Yield heads and runs of channels that hold the wrong ones; `word` is what one channel is."""
    numbers = torch.arange(wrong.numel())
    if head_dim is not None and wrong.numel() % head_dim == 0:
        yield from _head_regions(wrong, numbers, head_dim)
    yield from range_regions(wrong, numbers, torch.ones_like(wrong), word=f"from {word}")


def _log_chance(wrong: torch.Tensor, items: torch.Tensor, num_choices: float) -> float:
    """Return the log of the chance that a region of that size holds all wrong items; 0 where this one does not."""
    if bool((wrong & ~items).any()) or not bool(wrong.any()):
        return 0.0
    num_wrong = int(wrong.sum())
    ways = _log_ways(int(items.sum()), num_wrong) - _log_ways(wrong.numel(), num_wrong)
    return math.log(num_choices) + ways


def _log_ways(total: int, num_chosen: int) -> float:
    """Return the logarithm of the number of ways to choose so many of the total."""
    return math.lgamma(total + 1) - math.lgamma(num_chosen + 1) - math.lgamma(total - num_chosen + 1)


def _head_regions(wrong: torch.Tensor, numbers: torch.Tensor, head_dim: int) -> Iterator[Region]:
    heads, dims = numbers // head_dim, numbers % head_dim
    held = sorted(set(heads[wrong].tolist()))
    yield Region(
        words="of " + _count_words("head", held),
        items=torch.isin(heads, torch.tensor(held)),
        num_choices=math.comb(wrong.numel() // head_dim, len(held)),
    )
    for region in range_regions(wrong, dims, torch.ones_like(wrong), word="in dim"):
        yield Region(words=f"{region.words} of each head", items=region.items, num_choices=region.num_choices)


def _count_words(noun: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"{noun}s " + ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits on right ports: ρ of the worst token, and of the worst channel where it is limited."""

    token: float
    channel: float | None


def describe_regions(
    rows: Rows,
    *,
    bounds: Bounds,
    decoded: torch.Tensor | None,
    experts: torch.Tensor | None,
    head_dim: int | None,
    channel_word: str = "channel",
) -> tuple[str, ...]:
    """Describe where the error of a site lies; nothing where it is everywhere.

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
        found = tightest(channels, channel_regions(channels, head_dim, channel_word))
        if found is not None:
            sentences.append(_word(f"wrong {channel_word}s", channels, found))
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
    def candidates(within: torch.Tensor) -> Iterator[Region]:
        yield from row_regions(wrong, places[:, 0])
        yield from range_regions(wrong, places[:, 1], within, word="at position")
        if decoded is not None:
            yield Region(words="decoded one at a time", items=decoded, num_choices=1)
            yield Region(words="computed in one pass", items=~decoded, num_choices=1)
        if experts is not None:
            yield from expert_regions(wrong, experts, within)

    single = list(candidates(torch.ones_like(wrong)))
    pairs = [
        one & other
        for one in single
        for other in candidates(one.items)
        if other.adds_to(one, wrong) and one.adds_to(other, wrong)
    ]
    found = tightest(wrong, (*single, *pairs))
    if found is not None:
        yield _word(subject, wrong, found)


def _word(subject: str, wrong: torch.Tensor, region: Region) -> str:
    num_wrong, num_there = int(wrong.sum()), int(region.items.sum())
    share = f"all {num_there}" if num_wrong == num_there else f"{num_wrong} of the {num_there}"
    return f"{subject}: {share} {region.words}; the {int((~region.items).sum())} others are right"


def _wrong_channels(rows: Rows, bounds: Bounds) -> torch.Tensor | None:
    """Find channels that are off by more than BF16 costs right ports, bool [F]; None where nothing tells."""
    if rows.twin is None or bounds.channel is None or rows.input_error is not None:
        return None
    twin = rows.twin.float()
    error = (rows.target.float() - twin).square().sum(dim=0, dtype=torch.float64)
    floor = (rows.reference.float() - twin).square().sum(dim=0, dtype=torch.float64)
    ratios = (error / floor.clamp(min=max(float(floor.median()), TINY_FLOAT32))).sqrt()
    return ratios > bounds.channel


def _describe_content(rows: Rows, channels: torch.Tensor, head_dim: int | None) -> Iterator[str]:
    """Describe the wrong values: zeros, a multiple of the golden's, or other heads of it."""
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
                f"in head {region} the golden's head {origin}" for region, origin in moved
            )


def _moved_heads(rows: Rows, head_dim: int) -> list[tuple[int, int]]:
    """Find heads of the port that hold another head of the golden: its place, and the golden's."""
    golden, port = (
        torch.nn.functional.normalize(
            side.double().unflatten(-1, (-1, head_dim)).transpose(0, 1).flatten(1), dim=-1
        )
        for side in (rows.reference, rows.target)
    )
    likeness = port @ golden.T
    best = likeness.argmax(dim=-1).tolist()
    return [
        (region, origin)
        for region, origin in enumerate(best)
        if origin != region and float(likeness[region, origin]) > _SAME_HEAD
    ]

"""Place: some of the tokens or channels of a site, in words, and whether it is one that an error lies in.

Each place that holds all that is wrong is a candidate; the smallest is told, where so much would hardly lie in it by
chance.
T judged tokens, F channels of a site, H heads of D channels, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

# A place is told where chance would put all that is wrong into one as small this rarely.
_CHANCE = 1e-6
# A place within another is told where it is this unlikely there.
_CHANCE_WITHIN = 1e-3
# A place that leaves less than this outside says nothing.
_MOST_OF_ALL = 0.9
_MOST_EXPERTS_SHARE = 4  # of all experts, at most a quarter are a place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Some of the tokens or channels.

    Args:
        words: Which, in words.
        items: They, bool [T] or [F].
        num_choices: Among how many such places it was found.
    """

    words: str
    items: torch.Tensor
    num_choices: float

    def __and__(self, other: Place) -> Place:
        """What lies in both."""
        return Place(
            words=f"{self.words}, {other.words}",
            items=self.items & other.items,
            num_choices=self.num_choices * other.num_choices,
        )

    def adds_to(self, other: Place, wrong: torch.Tensor) -> bool:
        """Whether it says something of what is wrong, bool [T] or [F], within another place."""
        items = other.items
        return _log_chance(wrong[items], self.items[items], self.num_choices) < math.log(_CHANCE_WITHIN)


def tightest(wrong: torch.Tensor, candidates: Iterable[Place]) -> Place | None:
    """The smallest place that holds all that is wrong, if that is hardly chance."""
    best: Place | None = None
    for place in candidates:
        size = int(place.items.sum())
        is_small = size <= _MOST_OF_ALL * wrong.numel() and (best is None or size < int(best.items.sum()))
        if is_small and _log_chance(wrong, place.items, place.num_choices) < math.log(_CHANCE):
            best = place
    return best


def row_places(wrong: torch.Tensor, rows: torch.Tensor) -> Iterator[Place]:
    """The rows of the batch that hold wrong tokens; `rows` [T] tells each token's."""
    held = sorted(set(rows[wrong].tolist()))
    yield Place(
        words="in " + _count_words("row", held),
        items=torch.isin(rows, torch.tensor(held)),
        num_choices=math.comb(int(rows.unique().numel()), len(held)),
    )


def range_places(
    wrong: torch.Tensor, numbers: torch.Tensor, within: torch.Tensor, *, word: str
) -> Iterator[Place]:
    """From the first wrong number to the last; open where the range ends as the numbers do."""
    low, high = int(numbers[wrong].min()), int(numbers[wrong].max())
    least, most = int(numbers[within].min()), int(numbers[within].max())
    if low > least:
        yield Place(words=f"{word}s from {low} on", items=numbers >= low, num_choices=float(most - least + 1))
    if high < most:
        words = f"{word} {low}" if low == high else f"{word}s {low} to {high}"
        yield Place(
            words=words,
            items=(numbers >= low) & (numbers <= high),
            num_choices=float(most - least + 1) ** 2,
        )


def expert_places(wrong: torch.Tensor, experts: torch.Tensor, within: torch.Tensor) -> Iterator[Place]:
    """The fewest experts without which no token is wrong: of those that most wrong tokens need, one after the other."""
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
        yield Place(
            words="of " + _count_words("expert", sorted(chosen)),
            items=takes[:, chosen].any(dim=1),
            num_choices=math.comb(num_experts, len(chosen)),
        )


def channel_places(wrong: torch.Tensor, head_dim: int | None, word: str) -> Iterator[Place]:
    """Heads and runs of channels that hold the wrong ones; `word` is what one channel is."""
    numbers = torch.arange(wrong.numel())
    if head_dim is not None and wrong.numel() % head_dim == 0:
        yield from _head_places(wrong, numbers, head_dim)
    yield from range_places(wrong, numbers, torch.ones_like(wrong), word=f"from {word}")


def _log_chance(wrong: torch.Tensor, items: torch.Tensor, num_choices: float) -> float:
    """How likely one of so many places of that size holds by chance all that is wrong; 0 where this one does not."""
    if bool((wrong & ~items).any()) or not bool(wrong.any()):
        return 0.0
    num_wrong = int(wrong.sum())
    ways = _log_ways(int(items.sum()), num_wrong) - _log_ways(wrong.numel(), num_wrong)
    return math.log(num_choices) + ways


def _log_ways(total: int, num_chosen: int) -> float:
    """Logarithm of the number of ways to choose so many of the total."""
    return math.lgamma(total + 1) - math.lgamma(num_chosen + 1) - math.lgamma(total - num_chosen + 1)


def _head_places(wrong: torch.Tensor, numbers: torch.Tensor, head_dim: int) -> Iterator[Place]:
    heads, dims = numbers // head_dim, numbers % head_dim
    held = sorted(set(heads[wrong].tolist()))
    yield Place(
        words="of " + _count_words("head", held),
        items=torch.isin(heads, torch.tensor(held)),
        num_choices=math.comb(wrong.numel() // head_dim, len(held)),
    )
    for place in range_places(wrong, dims, torch.ones_like(wrong), word="in dim"):
        yield Place(words=f"{place.words} of each head", items=place.items, num_choices=place.num_choices)


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

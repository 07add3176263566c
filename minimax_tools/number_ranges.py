"""Number ranges: ascending whole numbers as ranges, and in words."""

from __future__ import annotations

from collections.abc import Iterable

Range = tuple[int, int]  # both ends included


def number_ranges(numbers: Iterable[int]) -> tuple[Range, ...]:
    """Return different ascending numbers as ranges."""
    ranges: list[Range] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


def word_ranges(ranges: Iterable[Range]) -> list[str]:
    """Return ranges in words, such as `0-3` and `5`."""
    return [f"{low}" if low == high else f"{low}-{high}" for low, high in ranges]

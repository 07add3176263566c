"""Order words: the shortest true description of an order in which numbers lie."""

from __future__ import annotations

from collections.abc import Sequence

# More exchanged pairs than this have another pattern, or none.
_MOST_PAIRS = 3
# Numbers that are told of an order without a pattern, from the first that is not in its place.
_MOST_SHOWN = 4


def word_order(numbers: Sequence[int], *, noun: str) -> str:
    """Return the order of numbers as a clause, such as `experts 5 and 6 are exchanged`; `noun` is their plural.

    | numbers | text, for `experts` |
    |---|---|
    | 0 1 2 4 3 5 | experts 3 and 4 are exchanged |
    | 5 4 3 2 1 0 | experts lie in reverse order |
    | 3 4 5 0 1 2 | experts lie with their halves exchanged |
    | 2 3 4 5 0 1 | experts lie rolled by 2: the first is 2 |
    | 0 1 10 11 2 3 | experts lie in the order of their numbers as text: 0, 1, 10, … |
    | 0 4 1 3 5 2 | experts lie in another order, from place 1 on: 4, 1, 3, 5, … |
    """
    ascending = sorted(numbers)
    moved = [place for place, number in enumerate(numbers) if number != ascending[place]]
    if not moved:
        return f"{noun} lie in order"
    pairs = _exchanged_pairs(numbers, ascending, moved)
    if 0 < len(pairs) <= _MOST_PAIRS:
        return f"{noun} {', '.join(f'{first} and {second}' for first, second in pairs)} are exchanged"
    if list(numbers) == ascending[::-1]:
        return f"{noun} lie in reverse order"
    start = ascending.index(numbers[0])
    if list(numbers) == ascending[start:] + ascending[:start]:
        if 2 * start == len(numbers):
            return f"{noun} lie with their halves exchanged"
        return f"{noun} lie rolled by {start}: the first is {numbers[0]}"
    if list(numbers) == sorted(numbers, key=str):
        shown = ", ".join(map(str, numbers[:_MOST_SHOWN]))
        return f"{noun} lie in the order of their numbers as text: {shown}, …"
    first = moved[0]
    told = ", ".join(map(str, numbers[first : first + _MOST_SHOWN]))
    more = ", …" if len(numbers) > first + _MOST_SHOWN else ""
    return f"{noun} lie in another order, from place {first} on: {told}{more}"


def _exchanged_pairs(
    numbers: Sequence[int], ascending: Sequence[int], moved: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the pairs of numbers that lie in each other's places; [] if other numbers are moved too."""
    place_of = {number: place for place, number in enumerate(numbers)}
    if len(place_of) < len(numbers):
        return []
    pairs = []
    for place in moved:
        other = place_of[ascending[place]]
        if numbers[place] != ascending[other]:
            return []
        if place < other:
            pairs.append((ascending[place], ascending[other]))
    return pairs

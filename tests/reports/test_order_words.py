"""Orders are told by the shortest true description."""

from __future__ import annotations

import pytest

from reports.wording import word_order


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0, 1, 2), "experts lie in order"),
        ((0, 1, 2, 4, 3, 5), "experts 3 and 4 are exchanged"),
        ((2, 1, 0, 4, 3, 5), "experts 0 and 2, 3 and 4 are exchanged"),
        ((7, 6, 5, 4, 3, 2, 1, 0), "experts lie in reverse order"),
        ((4, 5, 6, 7, 0, 1, 2, 3), "experts lie with their halves exchanged"),
        ((2, 3, 4, 5, 0, 1), "experts lie rolled by 2: the first is 2"),
        (
            tuple(sorted(range(12), key=str)),
            "experts lie in the order of their numbers as text: 0, 1, 10, 11, …",
        ),
        ((0, 4, 1, 3, 5, 2), "experts lie in another order, from place 1 on: 4, 1, 3, 5, …"),
        # An expert that lies twice is exchanged with none.
        ((1, 2, 1), "experts lie in another order, from place 1 on: 2, 1"),
    ],
)
def test_shortest_description_is_chosen(numbers: tuple[int, ...], text: str) -> None:
    assert word_order(numbers, noun="experts") == text


def test_order_of_other_numbers_than_the_first_is_described_too() -> None:
    assert word_order((8, 10, 9), noun="experts") == "experts 9 and 10 are exchanged"

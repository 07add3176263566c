from __future__ import annotations

import pytest

from minimax_tools.machine.size import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("12GB", 12 * 10**9),
        ("40GiB", 40 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        (" 8 mb ", 8 * 10**6),
        ("64mIb", 2**26),
        # As binary fractions these would come out a byte short.
        ("4.35GB", 4_350_000_000),
        ("1.1KB", 1100),
    ],
)
def test_size_is_whole_bytes_of_its_unit(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12",
        "1e3GB",
        "-1GB",
        "1,5GB",
        "12G",
        ".5GB",
        "٣GB",
    ],
)
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: expected a number and a unit, for example 500MB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (1000, "1.0 kB"),
        (12_340_000_000, "12.3 GB"),
        (999_949_999, "999.9 MB"),
        (999_960_000, "1.0 GB"),
        (-4_200_000, "-4.2 MB"),
    ],
)
def test_size_is_worded_in_the_largest_unit_it_fills(num_bytes: int, words: str) -> None:
    assert format_size(num_bytes) == words

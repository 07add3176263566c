"""Content of a cache: each mistake is named by its own content, and right content by none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from compare.catalogue.cache import CACHE_MISTAKES, CacheContent, holds_scaled_bits, is_before_rope
from minimax_tools.capture.passes import CachePair

SHAPE = (3, 4, 9, 16)  # [B,K,S,D]
NOISE = torch.tensor(2e-3)


def draw(seed: int) -> CachePair:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


RIGHT, OTHER, UNROTATED = draw(0), draw(1), draw(2)[0]


def others() -> Iterator[tuple[int, CachePair]]:
    yield 5, OTHER


def content(cached: CachePair) -> CacheContent:
    tokens = torch.ones(SHAPE[0], SHAPE[2], dtype=torch.bool)
    tokens[1, 6:] = False
    return CacheContent(
        cached=cached,
        right=RIGHT,
        noise=(NOISE, NOISE),
        tokens=tokens,
        real=tokens,
        others=others,
        unrotated=UNROTATED,
    )


def named(cached: CachePair) -> list[tuple[str, dict[str, object]]]:
    found = ((name, find(content(cached))) for name, find in CACHE_MISTAKES.items())
    return [(name, dict(parameters)) for name, parameters in found if parameters is not None]


def both(edit: Callable[[torch.Tensor], torch.Tensor]) -> CachePair:
    return edit(RIGHT[0]), edit(RIGHT[1])


def with_nines(cached: CachePair, place: tuple[int | slice, ...]) -> CachePair:
    """The pair with nines at a place."""
    copies = tuple(part.clone() for part in cached)
    for part in copies:
        part[place] = 9.0
    return copies[0], copies[1]


def test_tokens_that_the_other_prompt_lacks_do_not_count() -> None:
    rolled = both(lambda part: part.roll(1, dims=0))
    # Row 2 holds row 1, whose tokens end before the sixth.
    assert named(with_nines(rolled, (2, slice(None), slice(6, None)))) == [
        ("cache_of_another_prompt", {"by": 1})
    ]


@pytest.mark.parametrize(("by", "end"), [(1, 0), (-1, -1)])
def test_entry_that_nothing_moved_to_does_not_count(by: int, end: int) -> None:
    rolled = both(lambda part: part.roll(by, dims=2))
    assert named(with_nines(rolled, (slice(None), slice(None), end))) == [("cache_one_row_off", {"by": by})]


@pytest.mark.parametrize(("by", "entry"), [(1, 6), (-1, 5)])
def test_entry_beside_padding_does_not_count(by: int, entry: int) -> None:
    rolled = both(lambda part: part.roll(by, dims=2))
    # Row 1 has six tokens: no token moved to its seventh entry, and padding moved to its sixth.
    assert named(with_nines(rolled, (1, slice(None), entry))) == [("cache_one_row_off", {"by": by})]


@pytest.mark.parametrize(
    ("cached", "name", "parameters"),
    [
        (both(torch.zeros_like), "cache_not_written", {}),
        (OTHER, "cache_of_another_layer", {"layer": 5}),
        (both(lambda part: part.roll(1, dims=0)), "cache_of_another_prompt", {"by": 1}),
        (both(lambda part: part.roll(1, dims=2)), "cache_one_row_off", {"by": 1}),
        (both(lambda part: part[:, [1, 0, 3, 2]]), "cache_heads_exchanged", {"order": "1, 0, 3, 2"}),
        ((RIGHT[1], RIGHT[0]), "cache_keys_and_values_exchanged", {}),
        (
            both(lambda part: part.to(torch.float8_e4m3fn).float()),
            "cache_fp8_without_scale",
            {"dtype": "float8_e4m3fn"},
        ),
        (
            both(lambda part: part.to(torch.float8_e5m2).float()),
            "cache_fp8_without_scale",
            {"dtype": "float8_e5m2"},
        ),
        ((UNROTATED, RIGHT[1]), "cache_keys_rotated_wrongly", {}),
    ],
)
def test_content_names_its_mistake(cached: CachePair, name: str, parameters: dict[str, object]) -> None:
    assert named(cached)[0] == (name, parameters)


def moved(rows: int, tokens: slice, to: tuple[int, slice]) -> CachePair:
    """The right pair in which some tokens hold what is at others."""

    def edit(part: torch.Tensor) -> torch.Tensor:
        changed = part.clone()
        changed[rows, :, tokens] = part[to[0], :, to[1]]
        return changed

    return both(edit)


@pytest.mark.parametrize(
    ("cached", "wrong", "of"),
    [
        (moved(2, slice(4, 7), (2, slice(1, 4))), [(2, 4), (2, 5), (2, 6)], "row 2, tokens 1-3"),
        (moved(1, slice(0, 2), (0, slice(3, 5))), [(1, 0), (1, 1)], "row 0, tokens 3-4"),
        ((RIGHT[0], moved(0, slice(8, 9), (1, slice(2, 3)))[1]), [(0, 8)], "row 1, token 2"),
    ],
)
def test_entries_of_other_tokens_are_found_among_all(
    cached: CachePair, wrong: list[tuple[int, int]], of: str
) -> None:
    held = content(cached)
    narrowed = held.at(held.wrong_tokens())
    assert narrowed.tokens.nonzero().tolist() == [list(place) for place in wrong]
    mistake = CACHE_MISTAKES["cache_of_other_tokens"]
    assert mistake(narrowed) == {"of": of}
    # An entry that no token has is none of another token.
    assert mistake(content(with_nines(cached, (0, slice(None), 8)))) is None


def test_float16_holds_what_it_can_and_infinity() -> None:
    large = both(lambda part: part * 1e5)
    held = replace(content(both(lambda part: (part * 1e5).half().float())), right=large, noise=(NOISE, NOISE))
    mistake = CACHE_MISTAKES["cache_low_precision"]
    assert mistake(held) == {"dtype": "float16"}
    assert mistake(replace(held, cached=large)) != {"dtype": "float16"}


def test_other_content_has_no_name() -> None:
    other = draw(7)
    assert named(other) == []
    # FP8 numbers, and not those nearest to the right ones.
    assert named((other[0].to(torch.float8_e4m3fn).float(), other[1].to(torch.float8_e4m3fn).float())) == []


def test_right_content_that_fp8_holds_is_not_named() -> None:
    held = both(lambda part: part.to(torch.float8_e4m3fn).float())
    fp8 = CACHE_MISTAKES["cache_fp8_without_scale"]
    assert fp8(replace(content(held), right=held)) is None


def test_wrong_heads_are_those_with_a_third_of_the_worst_error() -> None:
    keys, values = both(torch.clone)
    keys[:, 0] *= 1.01
    values[:, 3] *= 1.1
    noise = torch.tensor(1e-4), torch.tensor(1e-2)
    # Keys are off by 100 times their noise, values by 10 times theirs.
    assert replace(content((keys, values)), noise=noise).wrong_heads() == [0]
    assert content((keys, values)).wrong_heads() == [3]
    values[:, 1] *= 1.04
    assert content((keys, values)).wrong_heads() == [1, 3]


def test_fewer_bits_with_scales_are_told_from_fp8_without() -> None:
    def scaled(part: torch.Tensor) -> torch.Tensor:
        scale = part.abs().amax(-1, keepdim=True) / 448
        return (part / scale).to(torch.float8_e4m3fn).float() * scale

    assert named(both(scaled)) == []
    assert holds_scaled_bits(content(both(scaled)))
    assert not holds_scaled_bits(content(OTHER))


@pytest.mark.parametrize(("error", "is_near"), [(0.06, True), (0.12, False)])
def test_fewer_bits_are_off_by_no_more_than_three_bits_of_mantissa(error: float, is_near: bool) -> None:
    assert holds_scaled_bits(content(both(lambda part: part * (1 + error)))) is is_near
    # Keys and values both.
    assert not holds_scaled_bits(content((RIGHT[0], OTHER[1])))
    assert not holds_scaled_bits(content((OTHER[0], RIGHT[1])))


def test_error_is_that_of_the_tokens_in_question() -> None:
    wrong = RIGHT[0].clone()
    wrong[0, :, 8] += 9.0
    found = content((wrong, RIGHT[1]))
    first = torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
    first[0, 0] = True
    assert found.rho(RIGHT) > 100
    assert found.rho(RIGHT, tokens=first) == found.at(first).rho(RIGHT) == 0.0
    assert (found.is_explained(RIGHT), found.is_explained(RIGHT, tokens=first)) == (False, True)
    assert found.at(first & False).rho(RIGHT) == torch.inf


def test_rows_and_entries_are_found_by_how_far_they_are_off() -> None:
    assert named(both(lambda part: part.roll(2, dims=0)))[0] == ("cache_of_another_prompt", {"by": 2})
    assert named(both(lambda part: part.roll(-1, dims=2)))[0] == ("cache_one_row_off", {"by": -1})


# The noise is smaller than a rounding to BF16, and larger than one to float16; then smaller than both.
@pytest.mark.parametrize(("dtype", "noise"), [(torch.bfloat16, 1e-3), (torch.float16, 1e-4)])
def test_lower_dtype_is_named(dtype: torch.dtype, noise: float) -> None:
    low = CACHE_MISTAKES["cache_low_precision"]
    held = content(both(lambda part: part.to(dtype).float()))
    found = low(replace(held, noise=(torch.tensor(noise), torch.tensor(noise))))
    assert found == {"dtype": str(dtype).removeprefix("torch.")}


def test_keys_before_rope_are_a_form_only_with_right_values() -> None:
    assert is_before_rope(content((UNROTATED, RIGHT[1])))
    assert not is_before_rope(content((UNROTATED, OTHER[1])))
    assert not is_before_rope(replace(content((UNROTATED, RIGHT[1])), unrotated=None))

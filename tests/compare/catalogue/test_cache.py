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


def both(edit: Callable[[torch.Tensor], torch.Tensor]) -> CachePair:
    return edit(RIGHT[0]), edit(RIGHT[1])


def with_nines(cached: CachePair, place: tuple[int | slice, ...]) -> CachePair:
    """The pair with nines at a place."""
    copies = tuple(part.clone() for part in cached)
    for part in copies:
        part[place] = 9.0
    return copies[0], copies[1]


def to_dtype(dtype: torch.dtype) -> CachePair:
    return both(lambda part: part.to(dtype).float())


def rolled(by: int, dim: int, *nines: int | slice) -> CachePair:
    """The right pair, rolled; nines where no entry was moved to do not count."""
    pair = both(lambda part: part.roll(by, dims=dim))
    return with_nines(pair, nines) if nines else pair


EVERY = slice(None)
FP8, SMALL_FP8, HALF = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16


def moved(row: int, tokens: slice, to: tuple[int, slice]) -> CachePair:
    """The right pair in which some tokens hold what is at others."""

    def edit(part: torch.Tensor) -> torch.Tensor:
        changed = part.clone()
        changed[row, :, tokens] = part[to[0], :, to[1]]
        return changed

    return both(edit)


def scaled_fp8(part: torch.Tensor) -> torch.Tensor:
    scale = part.abs().amax(-1, keepdim=True) / 448
    return (part / scale).to(FP8).float() * scale


def of_noise(cached: CachePair, keys: float, values: float | None = None) -> CacheContent:
    noise = torch.tensor(keys), torch.tensor(keys if values is None else values)
    return replace(content(cached), noise=noise)


def wrong_heads(*factors: float) -> CachePair:
    """Keys of the first head are a hundredth too large, and values of heads 1 and 3 by these factors."""
    keys, values = both(torch.clone)
    keys[:, 0] *= 1.01
    for head, factor in zip((3, 1), factors, strict=False):
        values[:, head] *= factor
    return keys, values


def word_content(held: CacheContent) -> str:
    """The mistakes that the content names, the first for `named`, and the forms that it is in."""
    found = {name: find(held) for name, find in CACHE_MISTAKES.items()}
    named = [f"{name} {dict(parameters)}" for name, parameters in found.items() if parameters is not None]
    forms = {
        "fewer bits with scales": holds_scaled_bits(held),
        "keys before the rotation": is_before_rope(held),
    }
    return "\n".join([*named, *(f"  {form}" for form, is_held in forms.items() if is_held)]) or "no name"


def test_contents_read_as_their_golden_text(expect_text: Callable[..., None]) -> None:
    large = replace(content(both(lambda part: (part * 1e5).half().float())), right=both(lambda p: p * 1e5))
    pairs = {
        "zeros": both(torch.zeros_like),
        "another layer": OTHER,
        "another prompt": rolled(1, 0),
        "the prompt before the last": rolled(2, 0),
        # Row 2 holds row 1, whose tokens end before the sixth.
        "another prompt, which lacks tokens": rolled(1, 0, 2, EVERY, slice(6, None)),
        "one row later": rolled(1, 2),
        "one row earlier": rolled(-1, 2),
        "one row later, to which nothing moved at the end": rolled(1, 2, EVERY, EVERY, 0),
        "one row earlier, to which nothing moved at the end": rolled(-1, 2, EVERY, EVERY, -1),
        # Row 1 has six tokens: no token moved to its seventh entry, and padding moved to its sixth.
        "one row later, beside padding": rolled(1, 2, 1, EVERY, 6),
        "one row earlier, beside padding": rolled(-1, 2, 1, EVERY, 5),
        "exchanged heads": both(lambda part: part[:, [1, 0, 3, 2]]),
        "exchanged keys and values": (RIGHT[1], RIGHT[0]),
        "FP8 without a scale": to_dtype(FP8),
        "FP8 of another format": to_dtype(SMALL_FP8),
        "FP8 with scales": both(scaled_fp8),
        "keys before the rotation": (UNROTATED, RIGHT[1]),
        "keys before the rotation, and other values": (UNROTATED, OTHER[1]),
        "other content": draw(7),
        # FP8 numbers, and not those nearest to the right ones.
        "other content in FP8": (draw(7)[0].to(FP8).float(), draw(7)[1].to(FP8).float()),
        # Fewer bits are off by no more than three bits of mantissa.
        "0.06 too large": both(lambda part: part * 1.06),
        "0.12 too large": both(lambda part: part * 1.12),
        "other values alone": (RIGHT[0], OTHER[1]),
        "other keys alone": (OTHER[0], RIGHT[1]),
    }
    contents = {
        **{title: content(pair) for title, pair in pairs.items()},
        "right content that FP8 holds": replace(content(to_dtype(FP8)), right=to_dtype(FP8)),
        "float16 holds what it can and infinity": large,
        "large numbers": replace(large, cached=both(lambda part: part * 1e5)),
        # The noise is smaller than a rounding to BF16, and larger than one to float16; then smaller than both.
        "BF16": of_noise(to_dtype(torch.bfloat16), 1e-3),
        "float16": of_noise(to_dtype(HALF), 1e-4),
        "nothing is known before the rotation": replace(content((UNROTATED, RIGHT[1])), unrotated=None),
    }
    expect_text("cache.txt", {title: word_content(held) for title, held in contents.items()})


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
    assert mistake(content(with_nines(cached, (0, EVERY, 8)))) is None


def test_wrong_heads_are_those_with_a_third_of_the_worst_error() -> None:
    # Keys are off by 100 times their noise, values by 10 times theirs.
    assert of_noise(wrong_heads(1.1), 1e-4, 1e-2).wrong_heads() == [0]
    assert content(wrong_heads(1.1)).wrong_heads() == [3]
    assert content(wrong_heads(1.1, 1.04)).wrong_heads() == [1, 3]


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

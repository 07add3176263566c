"""The catalogue of mistakes that a cache's content shows: the keys and values that each pass wrote.

B prompts, K kv heads, S columns of the batch, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch

from compare.catalogue.candidates import NO_PARAMETERS, Parameters
from compare.catalogue.low_bits import FP8_DTYPES, round_to_fp8
from compare.noise.rows import TINY_FLOAT32
from minimax_tools.capture.passes import CachePair
from minimax_tools.errors import number_ranges, word_ranges

# Largest error of an explained cache, in units of the noise of keys and values.
_EXPLAINED_RHO = 2.0
# Noise of keys and values that were measured without any, relative to them: casts of equal values are equal.
_LEAST_NOISE = 1e-4
# Share of a cache's numbers that are the nearest to the right ones, if it was rounded to them.
_LEAST_ALIKE = 0.8
# Heads whose error is this share of the worst head's are wrong too.
_WRONG_SHARE = 0.3
# Error of a wrong token's key or value, in units of the usual noise of its head.
_WRONG_RHO = 6.0
# Rows, and ranges of tokens in each, that a sentence names.
_MOST_ROWS, _MOST_RANGES = 3, 6
# Wrong entries of which each is looked for among all others; more are taken at even distances.
_MOST_LOOKED_FOR = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheContent:
    """Content of a layer's cache beside the right one: keys and values, float32 [B,K,S,D]."""

    cached: CachePair
    right: CachePair
    noise: CachePair  # relative error of right keys, and of right values: scalars
    tokens: torch.Tensor  # tokens in question, bool [B,S]
    real: torch.Tensor  # all tokens that are not padding, bool [B,S]
    others: Callable[[], Iterator[tuple[int, CachePair]]]  # right content of other layers, the nearest first
    unrotated: torch.Tensor | None = None  # right keys before rotary embedding; None if not known

    def rho(self, predicted: CachePair, *, tokens: torch.Tensor | None = None) -> float:
        """Return the error of the cache against a prediction in units of noise: that of keys or values, the larger."""
        chosen = self.tokens if tokens is None else tokens
        return max(
            _relative_error(*parts, tokens=chosen) / float(noise)
            for *parts, noise in zip(self.cached, predicted, self.noise, strict=True)
        )

    def is_explained(self, predicted: CachePair, *, tokens: torch.Tensor | None = None) -> bool:
        """Decide whether the cache holds a prediction, up to noise."""
        return self.rho(predicted, tokens=tokens) <= _EXPLAINED_RHO

    def wrong_heads(self) -> list[int]:
        """Return the kv heads with the largest error of keys or values, in units of noise, ascending."""
        keys, _ = self.cached
        errors = [
            max(
                _relative_error(_of_head(found, head), _of_head(right, head), tokens=self.tokens)
                / float(noise)
                for found, right, noise in zip(self.cached, self.right, self.noise, strict=True)
            )
            for head in range(keys.shape[1])
        ]
        return [head for head, error in enumerate(errors) if error >= _WRONG_SHARE * max(errors)]

    def wrong_tokens(self) -> torch.Tensor:
        """Return the tokens in question that are wrong by themselves, bool [B,S]; all of them if none is clearly."""
        wrong = torch.zeros_like(self.tokens)
        for found, right, noise in zip(self.cached, self.right, self.noise, strict=True):
            # [B,K,S]: errors of each head, beside the usual size of that head.
            errors = (found - right).norm(dim=-1)
            sizes = right.transpose(1, 2)[self.tokens].norm(dim=-1).square().mean(0).sqrt()
            limit = _WRONG_RHO * float(noise) * sizes.clamp(min=TINY_FLOAT32)
            wrong |= ~(errors <= limit[None, :, None]).all(dim=1)
        wrong &= self.tokens
        return wrong if bool(wrong.any()) else self.tokens

    def at(self, tokens: torch.Tensor) -> CacheContent:
        """Return the same with other tokens in question, bool [B,S]."""
        return replace(self, tokens=tokens)


def _relative_error(cached: torch.Tensor, predicted: torch.Tensor, *, tokens: torch.Tensor) -> float:
    """Return the norm of the difference over that of the prediction, at some tokens [B,S] of [B,K,S,D]."""
    found, expected = (part.transpose(1, 2)[tokens] for part in (cached, predicted))
    if not found.numel():
        return torch.inf
    return float((found - expected).norm() / expected.norm().clamp(min=TINY_FLOAT32))


def _of_head(part: torch.Tensor, head: int) -> torch.Tensor:
    return part[:, head : head + 1]


def noise_of(exact: torch.Tensor, rounded: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the relative error of right content, from float32 and rounded values [B,K,S,D]: a scalar."""
    return torch.tensor(max(_relative_error(rounded, exact, tokens=tokens), _LEAST_NOISE))


def _not_written(content: CacheContent) -> Parameters | None:
    is_zero = all(not bool(part.transpose(1, 2)[content.tokens].any()) for part in content.cached)
    return NO_PARAMETERS if is_zero else None


def _of_another_layer(content: CacheContent) -> Parameters | None:
    return next(({"layer": layer} for layer, pair in content.others() if content.is_explained(pair)), None)


def _of_another_prompt(content: CacheContent) -> Parameters | None:
    num_rows = len(content.tokens)
    for by in range(1, num_rows):
        # Tokens that both prompts have.
        tokens = content.tokens & content.tokens.roll(by, dims=0)
        rolled = _both(content.right, partial(torch.roll, shifts=by, dims=0))
        if bool(tokens.any()) and content.is_explained(rolled, tokens=tokens):
            return {"by": by}
    return None


def _one_row_off(content: CacheContent) -> Parameters | None:
    for by in (1, -1):
        tokens = content.tokens & content.tokens.roll(by, dims=1)
        tokens[:, 0 if by > 0 else -1] = False
        rolled = _both(content.right, partial(torch.roll, shifts=by, dims=2))
        if bool(tokens.any()) and content.is_explained(rolled, tokens=tokens):
            return {"by": by}
    return None


def _heads_exchanged(content: CacheContent) -> Parameters | None:
    cached, _ = content.cached
    keys, _ = content.right
    heads = range(keys.shape[1])
    order = []
    for head in heads:
        errors = [
            _relative_error(_of_head(cached, head), _of_head(keys, other), tokens=content.tokens)
            for other in heads
        ]
        order.append(errors.index(min(errors)))
    if order == list(heads) or sorted(order) != list(heads):
        return None
    is_explained = content.is_explained(_both(content.right, lambda part: part[:, order]))
    return {"order": ", ".join(map(str, order))} if is_explained else None


def _keys_and_values_exchanged(content: CacheContent) -> Parameters | None:
    return NO_PARAMETERS if content.is_explained((content.right[1], content.right[0])) else None


def _fp8_without_scale(content: CacheContent) -> Parameters | None:
    for name in FP8_DTYPES:
        if _is_held_by(content, partial(round_to_fp8, dtype=name)):
            return {"dtype": name}
    return None


def _is_held_by(content: CacheContent, rounding: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Decide whether the cache holds numbers of a format, most of them those nearest to the right ones."""
    for cached, right in zip(content.cached, content.right, strict=True):
        found, expected = (part.transpose(1, 2)[content.tokens] for part in (cached, right))
        if not torch.equal(rounding(found), found):
            return False
        rounded = rounding(expected)
        # Where a right value lies near the middle of two numbers, noise may give the other one.
        share = float((found == rounded).float().mean())
        if torch.equal(rounded, expected) or share < _LEAST_ALIKE:
            return False
    return True


def _of_other_tokens(content: CacheContent) -> Parameters | None:
    """Find the tokens whose keys and values the wrong entries hold, each of them those of one other token."""
    places = content.tokens.nonzero()
    looked_for = places[:: max(len(places) // _MOST_LOOKED_FOR, 1)]
    keys, values = content.right
    wrong_kinds = [
        kind
        for kind, (found, right) in enumerate(zip(content.cached, content.right, strict=True))
        if _relative_error(found, right, tokens=content.tokens) > _EXPLAINED_RHO * float(content.noise[kind])
    ]
    if not wrong_kinds:
        return None
    held, known = (
        torch.cat([pair[kind].transpose(1, 2).flatten(2) for kind in wrong_kinds], dim=-1)
        for pair in (content.cached, (keys, values))
    )
    candidates = content.real.nonzero()
    distances = torch.cdist(
        held[looked_for[:, 0], looked_for[:, 1]], known[candidates[:, 0], candidates[:, 1]]
    )
    sources = candidates[distances.argmin(dim=1)]
    noise = max(float(content.noise[kind]) for kind in wrong_kinds)
    sizes = known[sources[:, 0], sources[:, 1]].norm(dim=-1)
    is_found = distances.min(dim=1).values <= _WRONG_RHO * noise * sizes
    if not bool(is_found.all()) or bool((sources == looked_for).all(dim=1).any()):
        return None
    return {"of": word_places(sources)}


def word_places(places: torch.Tensor) -> str:
    """Name tokens, int64 [n,2] of row and column, in ascending order: `row 1, tokens 24-31`; the first few rows."""
    rows = []
    for row in places[:, 0].unique().tolist():
        columns = places[places[:, 0] == row][:, 1].unique().tolist()
        rows.append(f"row {row}, token{'s' * (len(columns) > 1)} {_word_ranges(columns)}")
    return "; ".join(rows[:_MOST_ROWS]) + (
        f"; and {len(rows) - _MOST_ROWS} more rows" if len(rows) > _MOST_ROWS else ""
    )


def _word_ranges(numbers: list[int]) -> str:
    """Word ascending numbers as ranges, the first few: `0-7, 12`."""
    ranges = word_ranges(number_ranges(numbers))
    return ", ".join(ranges[:_MOST_RANGES]) + (" …" if len(ranges) > _MOST_RANGES else "")


def _low_precision(content: CacheContent) -> Parameters | None:
    keys, values = content.right
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if content.is_explained((keys.to(dtype).float(), values.to(dtype).float())):
            return {"dtype": name}
    # What float16 cannot hold is infinite.
    largest = torch.finfo(torch.float16).max
    held = replace(content, cached=_both(content.cached, lambda part: part.clamp(-largest, largest)))
    clamped = _both(content.right, lambda part: part.clamp(-largest, largest).half().float())
    is_infinite = any(bool(part.transpose(1, 2)[content.tokens].isinf().any()) for part in content.cached)
    return {"dtype": "float16"} if is_infinite and held.is_explained(clamped) else None


def _before_rope(content: CacheContent) -> Parameters | None:
    if content.unrotated is None:
        return None
    return NO_PARAMETERS if content.is_explained((content.unrotated, content.right[1])) else None


def _both(pair: CachePair, edit: Callable[[torch.Tensor], torch.Tensor]) -> CachePair:
    return edit(pair[0]), edit(pair[1])


# What finds the parameters of each mistake, by its name; the first that explains the content is named.
CACHE_MISTAKES: Mapping[str, Callable[[CacheContent], Parameters | None]] = MappingProxyType(
    {
        "cache_not_written": _not_written,
        "cache_of_another_layer": _of_another_layer,
        "cache_of_another_prompt": _of_another_prompt,
        "cache_one_row_off": _one_row_off,
        "cache_heads_exchanged": _heads_exchanged,
        "cache_keys_and_values_exchanged": _keys_and_values_exchanged,
        "cache_fp8_without_scale": _fp8_without_scale,
        "cache_low_precision": _low_precision,
        "cache_keys_rotated_wrongly": _before_rope,
        "cache_of_other_tokens": _of_other_tokens,
    }
)


def holds_scaled_bits(content: CacheContent) -> bool:
    """Decide whether the cache holds the right content in fewer bits, with scales, such as FP8 for each head."""
    for cached, right in zip(content.cached, content.right, strict=True):
        found, expected = (part.transpose(1, 2)[content.tokens] for part in (cached, right))
        largest = expected.abs().amax(-1, keepdim=True)
        # FP8 has three bits of mantissa, INT8 with a scale for each head steps of 1 / 127 of its largest number.
        is_near = (found - expected).abs() <= 0.07 * expected.abs() + 0.01 * largest
        if float(is_near.float().mean()) < 0.999:
            return False
    return True


def is_before_rope(content: CacheContent) -> bool:
    """Decide whether the cache holds keys before rotary embedding, and right values."""
    return _before_rope(content) is not None

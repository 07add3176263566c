"""Rounding: float32 values rounded as BF16 hardware would, row by row in one of three ways.

A batch may hold several copies of the same rows, each copy rounded in its own way (see `RoundedLayer`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch

# The bits of a float32 that hold its exponent. All other bits cleared, a value is the power of two below it.
_EXPONENT_BITS = 0x7F800000
# The distance of neighbouring BF16 numbers, relative to that power of two: BF16 has 7 bits of mantissa.
_STEP = 2.0**-7
# Knuth's multiplier for hashing. It puts neighbouring seeds far apart, so that their draws do not overlap.
_SEED_FACTOR = 2654435761


class RoundingKind(IntEnum):
    """A way to round; the copies of a batch lie in this order."""

    EXACT = 0  # not rounded
    NEAREST = 1  # to the nearest BF16 number, as hardware does
    RANDOM = 2  # moved by up to half a BF16 step: samples other orders of the same operations (Monte Carlo arithmetic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """A source of roundings."""

    seed: int  # seed of the random steps. The same `seed` and `draw` give the same steps.

    def apply(self, values: torch.Tensor, kinds: torch.Tensor, *, draw: int) -> torch.Tensor:
        """Round float32 values [R,…] in place, and return them.

        Args:
            values: The values; nothing else uses them.
            kinds: int64 [R], the `RoundingKind` of each row, ascending.
            draw: Number of this rounding. Roundings with different numbers have different random steps.
        """
        for kind, rows in _rows_to_round(kinds):
            part = values[rows]
            if kind is RoundingKind.NEAREST:
                part.copy_(part.bfloat16())
            elif kind is RoundingKind.RANDOM:
                part.addcmul_(_bf16_steps(part), self._noise(part, draw))
        return values

    def _noise(self, values: torch.Tensor, draw: int) -> torch.Tensor:
        """Draw values between −½ and ½ on the CPU, so that they are the same on every device."""
        # torch's CPU generator uses only 32 bits of a seed.
        generator = torch.Generator().manual_seed((self.seed * _SEED_FACTOR + draw) % 2**32)
        return torch.rand(values.shape, generator=generator).sub_(0.5).to(values.device)


def _bf16_steps(values: torch.Tensor) -> torch.Tensor:
    """Return the distance of neighbouring BF16 numbers around float32 values; 0 around 0."""
    powers = (values.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return powers.mul_(_STEP)


def _rows_to_round(kinds: torch.Tensor) -> Iterator[tuple[RoundingKind, slice]]:
    """Yield each kind that changes values, with the slice of its rows: `kinds` ascend, so they are neighbours."""
    counts = torch.bincount(kinds, minlength=len(RoundingKind)).tolist()
    start = 0
    for kind, count in zip(RoundingKind, counts, strict=True):
        if count and kind is not RoundingKind.EXACT:
            yield kind, slice(start, start + count)
        start += count

"""Rounding: float32 values rounded by the copy of a batch that they belong to.

A copy is exact, rounds as hardware does, or is off by a random half step of BF16 wherever hardware would round. The
last kind samples other orders of the same operations (Monte Carlo arithmetic).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch

# The bits of a float32 that hold its exponent, and a step of BF16 relative to the power of two that they stand for.
_EXPONENT_BITS = 0x7F800000
_STEP = 2.0**-7
# Spreads seeds so that their draws do not meet.
_GOLDEN_RATIO = 2654435761


class RoundingKind(IntEnum):
    """A way to round; the copies of a batch lie in this order."""

    EXACT = 0
    NEAREST = 1
    RANDOM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Rounds rows by the copy that they belong to.

    Args:
        seed: Of the random steps; the same seed and `draw` give the same ones.
    """

    seed: int

    def apply(self, values: torch.Tensor, kinds: torch.Tensor, *, draw: int) -> torch.Tensor:
        """Round float32 values [R,…] in place, and return them.

        Args:
            values: Contiguous.
            kinds: int64 [R], the `RoundingKind` of each row, ascending.
            draw: The number of this rounding, so that no two share their random steps.
        """
        for kind, rows in _slices(kinds):
            part = values[rows]
            if kind is RoundingKind.NEAREST:
                part.copy_(part.bfloat16())
            elif kind is RoundingKind.RANDOM:
                part.addcmul_(_steps(part), self._noise(part, draw))
        return values

    def _noise(self, values: torch.Tensor, draw: int) -> torch.Tensor:
        """Draw values between −½ and ½ on the CPU, so that they are the same on every device."""
        # torch's generator heeds 32 bits of a seed.
        generator = torch.Generator().manual_seed((self.seed * _GOLDEN_RATIO + draw) % 2**32)
        return torch.rand(values.shape, generator=generator).sub_(0.5).to(values.device)


def _steps(values: torch.Tensor) -> torch.Tensor:
    """Return the distance of neighbouring BF16 numbers around float32 values; 0 around 0."""
    powers = (values.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return powers.mul_(_STEP)


def _slices(kinds: torch.Tensor) -> Iterator[tuple[RoundingKind, slice]]:
    """Yield the rows of each kind that rounds."""
    counts = torch.bincount(kinds, minlength=len(RoundingKind)).tolist()
    start = 0
    for kind, count in zip(RoundingKind, counts, strict=True):
        if count and kind is not RoundingKind.EXACT:
            yield kind, slice(start, start + count)
        start += count

"""Value checksum: tells whether two sets of tensors hold the same values, in whatever order."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from operator import add

import torch

# Elements added up at once: 128 MiB in int64. Sums over elements of up to 4 bytes cannot overflow.
_ELEMENTS_AT_ONCE = 1 << 24
# The largest prime below 2¹⁶: bits are squared modulo it, so that a sum of squares cannot overflow.
_PRIME = 65_521
# The integer dtype of an element's size in bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class ValueChecksum:
    """A checksum of values in any order. Different values have equal checksums only by an unlikely chance."""

    count: int = 0  # number of values
    bits: int = 0  # sum of the values' bits, read as integers
    squared_bits: int = 0  # sum of the squares of these integers, each modulo a prime
    # Sum of the finite values' squares, to tell a scale by; not compared, as its rounding depends on the order.
    squares: float = field(default=0.0, compare=False)
    num_nonfinite: int = field(default=0, compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ValueChecksum:
        """Return the checksum of a tensor's values; -0 counts as 0."""
        total = cls()
        for chunk in tensor.detach().reshape(-1).split(_ELEMENTS_AT_ONCE):
            values = chunk.contiguous()
            without_minus_0 = torch.where(values == 0, torch.zeros_like(values), values)
            bits = without_minus_0.view(_INTEGERS[values.element_size()]).long()
            total += cls(
                count=values.numel(),
                bits=int(bits.sum()),
                squared_bits=int((bits * bits % _PRIME).sum()),
                squares=float(values.double().nan_to_num(0, 0, 0).square().sum()),
                num_nonfinite=int((~torch.isfinite(values)).sum()),
            )
        return total

    def __add__(self, other: ValueChecksum) -> ValueChecksum:
        return ValueChecksum(*map(add, astuple(self), astuple(other)))

"""Value checksum: tells whether two sets of tensors hold the same values, in whatever order.

Values of one or two bytes are counted by their bits, and the checksum follows from the counts. Wider ones are added up
one by one.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from operator import add

import numpy as np
import torch

from minimax_tools.machine.compiled import compiled
from neuron.weight_trace.port_tensors import INTEGERS

Codes = np.ndarray[tuple[int], np.dtype[np.uint16]]
Counts = np.ndarray[tuple[int], np.dtype[np.int64]]

# Elements added up at once: few enough to stay in a core's second-level cache.
_ELEMENTS_AT_ONCE = 1 << 15
# The largest prime below 2¹⁶: bits are squared modulo it, so that a sum of squares cannot overflow.
_PRIME = 65_521


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
        flat = tensor.detach().reshape(-1)
        if flat.itemsize <= 2:
            return cls._of_counted(*_count_values(flat))
        once = torch.ones(1, dtype=torch.int64)
        chunks = (cls._of_counted(chunk, once) for chunk in flat.split(_ELEMENTS_AT_ONCE))
        return sum(chunks, cls())

    @classmethod
    def _of_counted(cls, values: torch.Tensor, counts: torch.Tensor) -> ValueChecksum:
        """Return the checksum of values [n] of which each occurs `counts` times, int64 [n], or [1] for all of them."""
        numbers = values.double()
        bits = torch.where(numbers == 0, 0, values.view(INTEGERS[values.itemsize]).long())
        return cls(
            count=int(counts.expand(len(values)).sum()),
            bits=int((bits * counts).sum()),
            squared_bits=int((bits * bits % _PRIME * counts).sum()),
            squares=float((numbers.nan_to_num(0, 0, 0).square() * counts).sum()),
            num_nonfinite=int((~torch.isfinite(numbers) * counts).sum()),
        )

    def __add__(self, other: ValueChecksum) -> ValueChecksum:
        return ValueChecksum(*map(add, astuple(self), astuple(other)))


def _count_values(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of a tensor of one or two bytes, each once, and how often each occurs, int64."""
    integers = torch.uint8 if flat.itemsize == 1 else torch.uint16
    counts = np.zeros(1 << 8 * flat.itemsize, dtype=np.int64)
    for chunk in flat.split(_ELEMENTS_AT_ONCE):
        _count(chunk.contiguous().view(integers).to(torch.uint16).numpy(), counts)
    codes = np.flatnonzero(counts)
    return torch.from_numpy(codes).to(integers).view(flat.dtype), torch.from_numpy(counts[codes])


@compiled("(uint16[::1], int64[::1])")
def _count(codes: Codes, counts: Counts) -> None:
    for i in range(codes.size):
        counts[codes[i]] += 1

"""Reading: what the passes of a trace tell of one place."""

from __future__ import annotations

import torch

from neuron.origins.made_values import BASE, exact_probe, short_probe
from neuron.origins.origin import COMPUTED, CONSTANT, Origin
from neuron.origins.sources import Sources

# What a digit may be off after a scale and a rounding to BF16; four significant bits alone keep no digit of 16.
_DIGIT_SLACK = 0.3
# The last pass may be off by a rounding to a few bits; by more, another element or several landed there.
_MOST_ROUNDING = 0.08
# A place of which more is computed is computed.
_MOSTLY = 0.25


class Reading:
    """What the passes so far tell of a place.

    Args:
        first: The place after the pass of ones, float64.
        second: After the pass of twos.
        dtype: The place's own.
    """

    def __init__(self, first: torch.Tensor, second: torch.Tensor, *, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.first = first
        self.gain = second - first
        self.offset = first - self.gain
        self.numbers = torch.zeros(first.shape, dtype=torch.int64)
        self.is_constant = (self.gain == 0) | ~torch.isfinite(self.gain)
        self.is_computed = torch.zeros(first.shape, dtype=torch.bool)
        self.rounding = self.rounding_float32 = 0.0
        self._square_sum = torch.zeros(first.shape, dtype=torch.float64)
        self._signs = torch.zeros(first.shape, dtype=torch.float64)
        self._num_signs = 0
        self._kinds: list[str] = []

    def take_digit(self, values: torch.Tensor) -> None:
        """The place after the pass of the next digit, the highest first."""
        self._take_change(values)
        shown = (values - self.offset) / self.gain - 1
        digit = shown.round()
        is_digit = ((shown - digit).abs() < _DIGIT_SLACK) & (digit >= 0) & (digit < BASE)
        self.is_computed |= ~is_digit & ~self.is_constant
        self.numbers = self.numbers * BASE + torch.where(is_digit, digit, 0).long()

    def prove(self, values: torch.Tensor, sources: Sources) -> None:
        """The place after the pass of probes: what was read is right where they are those of its numbers."""
        self._take_change(values)
        self.is_computed |= (self.numbers >= sources.size) & ~self.is_constant
        numbers = self.numbers.clamp(max=sources.size - 1)
        is_float32 = torch.tensor([source.is_float32 for source in sources.all])[sources.find(numbers)]
        expected = torch.where(is_float32, exact_probe(numbers), short_probe(numbers)).double()
        shown = (values - self.offset) / self.gain
        error = ((shown - expected).abs() / expected).nan_to_num(nan=1.0)
        self.is_computed |= (error > _MOST_ROUNDING) & ~self.is_constant
        varies = ~self.is_constant
        if int(self.is_computed.sum()) > _MOSTLY * int(varies.sum()):
            # A mean of two numbers now and then looks like a third one.
            self.is_computed = varies
        is_single = varies & ~self.is_computed
        if is_single.any():
            self.rounding = float(error[is_single].max())
            exact = error[is_single & is_float32]
            self.rounding_float32 = float(exact.max()) if exact.numel() else 0.0

    def take_signs(self, values: torch.Tensor) -> None:
        """The place after one pass of signs."""
        self._square_sum += (values - self.offset) ** 2
        self._signs = (values - self.offset) / self.gain
        self._num_signs += 1

    def take_kind(self, kind: str, values: torch.Tensor) -> None:
        """The place after a pass of ones in which tensors of one kind alone differ."""
        if bool((values != self.first)[self.is_computed].any()):
            self._kinds.append(kind)

    def origin(self, name: str) -> Origin:
        """What all of them tell of the place of that name."""
        numbers = self.numbers.clone()
        numbers[self.is_constant] = CONSTANT
        numbers[self.is_computed] = COMPUTED
        is_single = numbers >= 0
        is_mixed = self.is_computed & (self.gain != 0) & torch.isfinite(self.gain)
        weight_sum = num_mixed = None
        if is_mixed.any() and self._num_signs:
            weight_sum = float(self.gain[is_mixed].mean())
            mean_square = float(self._square_sum[is_mixed].mean()) / self._num_signs
            square_of_sum = float((self.gain[is_mixed] ** 2).mean())
            if mean_square > 0:
                num_mixed = _count_mixed(self._signs[is_mixed], square_of_sum / mean_square)
        return Origin(
            name=name,
            shape=tuple(self.first.shape),
            dtype=self.dtype,
            numbers=numbers,
            gain=_one_number(self.gain[is_single]),
            offset=_one_number(self.offset[is_single]),
            rounding=self.rounding,
            rounding_float32=self.rounding_float32,
            constant=_one_number(self.first[self.is_constant & ~self.is_computed]),
            weight_sum=weight_sum,
            num_mixed=num_mixed,
            mixed_kinds=tuple(self._kinds),
        )

    def _take_change(self, values: torch.Tensor) -> None:
        """What held still between the levels and moves now depends on the checkpoint in no simple way."""
        moves = self.is_constant & (values != self.first) & ~(values.isnan() & self.first.isnan())
        self.is_constant &= ~moves
        self.is_computed |= moves


def _count_mixed(values: torch.Tensor, estimate: float) -> float:
    """Of how many signs of equal weight these are means: of n they are multiples of 2/n away from 1."""
    counts = range(max(1, int(estimate * 0.7)), int(estimate * 1.4) + 2)
    off = {
        count: float(((1 - values) * count / 2).sub(((1 - values) * count / 2).round()).abs().max())
        for count in counts
    }
    fitting = [count for count in counts if off[count] < _DIGIT_SLACK]
    return min(fitting, key=lambda count: abs(count - estimate)) if fitting else estimate


def _one_number(values: torch.Tensor) -> float | None:
    if not values.numel() or not bool((values == values[0]).all()):
        return None
    return float(values[0])

"""PlaceReading: what the passes of a trace tell of one place, or of a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from neuron.weight_trace.made_tensors import BASE, exact_probe, short_probe
from neuron.weight_trace.origin import ASIDE, COMPUTED, CONSTANT, Origin
from neuron.weight_trace.place_part import AT_ONCE
from neuron.weight_trace.sources import Sources

# What a digit may be off after a scale and a rounding to BF16; four significant bits alone keep no digit of 16.
_DIGIT_SLACK = 0.3
# The last pass may be off by a rounding to a few bits; by more, another element or several landed there.
_MOST_ROUNDING = 0.08
# A place of which more is computed is computed.
_MOSTLY = 0.25


class PlaceReading:
    """What the passes so far tell of a place.

    Kept are its values after the first two passes, in its own dtype, and what is known of each element.

    Args:
        first: The place after the pass of ones.
        second: After the pass of twos.
    """

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self._shape, self._dtype = tuple(first.shape), first.dtype
        self._first = first.reshape(-1).clone()
        self._second = second.reshape(-1).clone()
        count = self._first.numel()
        self._numbers = torch.zeros(count, dtype=torch.int64)
        self._is_constant = torch.zeros(count, dtype=torch.bool)
        self._is_computed = torch.zeros(count, dtype=torch.bool)
        self._is_aside = torch.zeros(count, dtype=torch.bool)
        for part in self._parts():
            gain, _ = self._levels(part)
            self._is_constant[part] = (gain == 0) | ~torch.isfinite(gain)
        self._rounding = self._rounding_float32 = 0.0
        # Of computed elements alone: indices, and what the passes of signs showed of them.
        self._mixed = torch.empty(0, dtype=torch.int64)
        self._square_sum = torch.empty(0, dtype=torch.float64)
        self._signs = torch.empty(0, dtype=torch.float64)
        self._num_signs = 0
        self._kinds: list[str] = []

    @property
    def has_computed(self) -> bool:
        """Whether no single element tells the value of some element."""
        return bool(self._is_computed.any())

    def take_aside(self, place: torch.Tensor) -> None:
        """The place after a pass in which what is not followed differs, and nothing else."""
        for part, values in self._split(place):
            self._is_aside[part] = self._is_constant[part] & (values != self._first[part].double())

    def take_digit(self, place: torch.Tensor) -> None:
        """The place after the pass of the next digit, the highest first."""
        for part, values in self._split(place):
            self._take_change(part, values)
            gain, offset = self._levels(part)
            shown = (values - offset) / gain - 1
            digit = shown.round()
            is_digit = ((shown - digit).abs() < _DIGIT_SLACK) & (digit >= 0) & (digit < BASE)
            self._is_computed[part] |= ~is_digit & ~self._is_constant[part]
            self._numbers[part] = self._numbers[part] * BASE + torch.where(is_digit, digit, 0).long()

    def prove(self, place: torch.Tensor, sources: Sources) -> None:
        """The place after the pass of probes: what was read is right where they are those of its numbers."""
        of_source = torch.tensor([source.is_float32 for source in sources.all])
        rounding = rounding_float32 = 0.0
        for part, values in self._split(place):
            self._take_change(part, values)
            is_constant = self._is_constant[part]
            is_computed = self._is_computed[part] | ((self._numbers[part] >= sources.size) & ~is_constant)
            numbers = self._numbers[part].clamp(max=sources.size - 1)
            is_float32 = of_source[sources.find(numbers)]
            expected = torch.where(is_float32, exact_probe(numbers), short_probe(numbers)).double()
            gain, offset = self._levels(part)
            error = (((values - offset) / gain - expected).abs() / expected).nan_to_num(nan=1.0)
            is_computed |= (error > _MOST_ROUNDING) & ~is_constant
            self._is_computed[part] = is_computed
            is_single = ~is_constant & ~is_computed
            rounding = max(rounding, _largest(error[is_single]))
            rounding_float32 = max(rounding_float32, _largest(error[is_single & is_float32]))
        if int(self._is_computed.sum()) > _MOSTLY * int((~self._is_constant).sum()):
            # A mean of two numbers now and then looks like a third one.
            self._is_computed = ~self._is_constant
        else:
            self._rounding, self._rounding_float32 = rounding, rounding_float32

    def take_signs(self, place: torch.Tensor) -> None:
        """The place after one pass of signs."""
        if self._num_signs == 0:
            gain, _ = self._levels(slice(None))
            is_mixed = self._is_computed & (gain != 0) & torch.isfinite(gain)
            self._mixed = is_mixed.nonzero().flatten()
            self._square_sum = torch.zeros(len(self._mixed), dtype=torch.float64)
        gain, offset = self._levels(self._mixed)
        shown = place.reshape(-1)[self._mixed].double() - offset
        self._square_sum += shown**2
        self._signs = shown / gain
        self._num_signs += 1

    def take_kind(self, kind: str, place: torch.Tensor) -> None:
        """The place after a pass of ones in which tensors of one kind alone differ."""
        for part, values in self._split(place):
            if bool((values != self._first[part].double())[self._is_computed[part]].any()):
                self._kinds.append(kind)
                return

    def origin(self, name: str, shape: tuple[int, ...]) -> Origin:
        """What all of them tell of the place of that name and shape."""
        numbers = self._numbers
        numbers[self._is_constant] = CONSTANT
        numbers[self._is_computed] = COMPUTED
        numbers[self._is_aside] = ASIDE
        weight_sum = num_mixed = None
        if len(self._mixed):
            gain, _ = self._levels(self._mixed)
            weight_sum = float(gain.mean())
            mean_square = float(self._square_sum.mean()) / self._num_signs
            if mean_square > 0:
                num_mixed = _count_mixed(self._signs, float((gain**2).mean()) / mean_square)
        return Origin(
            name=name,
            shape=shape,
            dtype=self._dtype,
            numbers=numbers.reshape(self._shape),
            gain=self._one_number(lambda part: self._levels(part)[0][numbers[part] >= 0]),
            offset=self._one_number(lambda part: self._levels(part)[1][numbers[part] >= 0]),
            rounding=self._rounding,
            rounding_float32=self._rounding_float32,
            constant=self._one_number(lambda part: self._first[part].double()[numbers[part] == CONSTANT]),
            weight_sum=weight_sum,
            num_mixed=num_mixed,
            mixed_kinds=tuple(self._kinds),
        )

    def _take_change(self, part: slice, values: torch.Tensor) -> None:
        """What held still between the levels and moves now depends on the checkpoint in no simple way."""
        first = self._first[part].double()
        moves = self._is_constant[part] & (values != first) & ~(values.isnan() & first.isnan())
        self._is_constant[part] &= ~moves
        self._is_computed[part] |= moves

    def _levels(self, part: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By what elements are multiplied, and what is added to them, float64."""
        first = self._first[part].double()
        gain = self._second[part].double() - first
        return gain, first - gain

    def _parts(self) -> list[slice]:
        return [slice(start, start + AT_ONCE) for start in range(0, self._first.numel(), AT_ONCE)]

    def _split(self, place: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        flat = place.reshape(-1)
        for part in self._parts():
            yield part, flat[part].double()

    def _one_number(self, values_of: Callable[[slice], torch.Tensor]) -> float | None:
        """The number that all values are; None where they differ, or there are none."""
        found = None
        for part in self._parts():
            values = values_of(part)
            if not values.numel():
                continue
            found = float(values[0]) if found is None else found
            if not bool((values == found).all()):
                return None
        return found


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _count_mixed(values: torch.Tensor, estimate: float) -> float:
    """Of how many signs of equal weight these are means: of n they are multiples of 2/n away from 1."""
    counts = range(max(1, int(estimate * 0.7)), int(estimate * 1.4) + 2)
    off = {
        count: float(((1 - values) * count / 2).sub(((1 - values) * count / 2).round()).abs().max())
        for count in counts
    }
    fitting = [count for count in counts if off[count] < _DIGIT_SLACK]
    return min(fitting, key=lambda count: abs(count - estimate)) if fitting else estimate

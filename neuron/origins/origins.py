"""Origins: for every element of what a port holds, the element of the checkpoint's layer that landed there.

The port's own conversion and loading are run several times on made tensors. Levels of 1 and 2 everywhere tell by what
an element is multiplied and what is added to it; then each element's number is spelled, one digit a pass; a last pass
of numbers without pattern proves what was read. Sixteen digits are exact even in FP8, and survive a scale in BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from minimax_tools.capture.manifest import dtype_name
from neuron.origins.made_tensors import Make
from neuron.origins.sources import Source, Sources

BASE = 16
# What a digit may be off after a scale and a rounding to BF16; four significant bits alone keep no digit of 16.
_DIGIT_SLACK = 0.3
# The last pass may be off by a rounding to a few bits; by more, another element or several landed there.
_MOST_ROUNDING = 0.08
# A place of which more is computed is computed.
_MOSTLY = 0.25

CONSTANT, COMPUTED = -1, -2
_NUM_SIGNS = 16

# Loads made tensors into the port, and gives every tensor that it then holds, by name.
LoadMade = Callable[[Make], Mapping[str, torch.Tensor]]
# The values of a source, from the numbers of its elements; one value stands for all.
Values = Callable[[Source, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origin:
    """Where the elements of one place come from.

    Args:
        name: The place's.
        shape: Its shape.
        dtype: Its dtype.
        numbers: Of its shape, int64: the number of the element that landed there, `CONSTANT` where nothing of the
            checkpoint does, `COMPUTED` where no single element tells the value.
        gain: What single elements are multiplied by, where that is one number; None where it differs.
        offset: What is added to them likewise.
        rounding: The largest relative error of the elements that landed, their scale apart; 0 where they came as given.
        rounding_float32: The same, of those that are given in float32 whatever the run's dtype.
        constant: The value of the constant elements, where that is one number.
        weight_sum: Of computed elements, what the weights of the elements they are made of add up to, on average.
        num_mixed: Of computed elements, of how many elements of equal weight each would be made; None where it cannot
            be told, as where the conversion is not linear.
        mixed_kinds: The kinds of tensors that computed elements depend on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: torch.Tensor
    gain: float | None
    offset: float | None
    rounding: float
    rounding_float32: float
    constant: float | None
    weight_sum: float | None = None
    num_mixed: float | None = None
    mixed_kinds: tuple[str, ...] = ()

    @property
    def landed(self) -> torch.Tensor:
        """The numbers that landed here, flat."""
        return self.numbers[self.numbers >= 0]

    @property
    def num_computed(self) -> int:
        """How many elements are computed."""
        return int((self.numbers == COMPUTED).sum())

    @property
    def num_constant(self) -> int:
        """How many elements do not depend on the checkpoint."""
        return int((self.numbers == CONSTANT).sum())

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {dtype_name(self.dtype)}"


class OriginReader:
    """Reads the origins of a port's places.

    Args:
        sources: The layer's tensors.
        load: Loads made tensors.
    """

    def __init__(self, sources: Sources, load: LoadMade) -> None:
        self._sources = sources
        self._load = load
        self._dtypes: dict[str, torch.dtype] = {}

    def read(self) -> list[Origin]:
        """The origin of every place, in the module's order.

        Raises:
            TargetError: The port's conversion raised, or does not fit its module.
        """
        first, second = self._pass(_level(1)), self._pass(_level(2))
        readings = {
            name: _Reading(values, second[name], dtype=self._dtypes[name])
            for name, values in first.items()
            if name in second and second[name].shape == values.shape
        }
        for power in reversed(range(self._num_digits())):
            for name, values in self._taking(readings, _digit(power)):
                readings[name].take_digit(values)
        for name, values in self._taking(readings, probe_values):
            readings[name].prove(values, self._sources)
        if any(bool(reading.is_computed.any()) for reading in readings.values()):
            self._weigh_computed(readings)
        return [reading.origin(name) for name, reading in readings.items()]

    def _num_digits(self) -> int:
        count = 1
        while BASE**count < self._sources.size:
            count += 1
        return count

    def _weigh_computed(self, readings: Mapping[str, _Reading]) -> None:
        """Feed signs without pattern: the mean square of what comes is the sum of the squares of the weights."""
        for seed in range(_NUM_SIGNS):
            for name, values in self._taking(readings, _signs(seed)):
                readings[name].take_signs(values)
        for kind in dict.fromkeys(source.kind for source in self._sources.all):
            for name, values in self._taking(readings, _level_but(kind)):
                readings[name].take_kind(kind, values)

    def _taking(self, readings: Mapping[str, _Reading], values_of: Values) -> list[tuple[str, torch.Tensor]]:
        return [(name, values) for name, values in self._pass(values_of).items() if name in readings]

    def _pass(self, values_of: Values) -> dict[str, torch.Tensor]:
        """What every place holds after a pass in which each element is made from its number."""

        def make(name: str) -> torch.Tensor:
            source = self._sources[name]
            numbers = torch.arange(source.start, source.start + source.size)
            return values_of(source, numbers).expand(source.size).reshape(source.shape)

        places = self._load(make)
        self._dtypes = {name: tensor.dtype for name, tensor in places.items()}
        return {name: tensor.to(torch.float64, copy=True) for name, tensor in places.items()}


class _Reading:
    """What the passes so far tell of a place."""

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
        self._take_change(values)
        shown = (values - self.offset) / self.gain - 1
        digit = shown.round()
        is_digit = ((shown - digit).abs() < _DIGIT_SLACK) & (digit >= 0) & (digit < BASE)
        self.is_computed |= ~is_digit & ~self.is_constant
        self.numbers = self.numbers * BASE + torch.where(is_digit, digit, 0).long()

    def prove(self, values: torch.Tensor, sources: Sources) -> None:
        self._take_change(values)
        self.is_computed |= (self.numbers >= sources.size) & ~self.is_constant
        numbers = self.numbers.clamp(max=sources.size - 1)
        is_float32 = torch.tensor([source.is_float32 for source in sources.all])[sources.find(numbers)]
        expected = torch.where(is_float32, _exact_probe(numbers), _short_probe(numbers)).double()
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
        self._square_sum += (values - self.offset) ** 2
        self._signs = (values - self.offset) / self.gain
        self._num_signs += 1

    def take_kind(self, kind: str, values: torch.Tensor) -> None:
        if bool((values != self.first)[self.is_computed].any()):
            self._kinds.append(kind)

    def origin(self, name: str) -> Origin:
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


def probe_values(source: Source, numbers: torch.Tensor) -> torch.Tensor:
    """Values from 1 to 2 without pattern, with as many bits as the tensor is given with."""
    return _exact_probe(numbers) if source.is_float32 else _short_probe(numbers)


def _exact_probe(numbers: torch.Tensor) -> torch.Tensor:
    mixed = (numbers * 2654435761 + 40503) % (1 << 32)
    mixed = ((mixed >> 15) ^ mixed) * 2246822519 % (1 << 32)
    return ((1 << 23) + (mixed >> 9)).float() / (1 << 23)


def _short_probe(numbers: torch.Tensor) -> torch.Tensor:
    return _exact_probe(numbers).bfloat16().float()


def _level(value: int) -> Values:
    return lambda source, numbers: torch.tensor([float(value)])


def _level_but(kind: str) -> Values:
    """One everywhere, but for one kind of tensors."""
    return lambda source, numbers: (
        probe_values(source, numbers) if source.kind == kind else torch.tensor([1.0])
    )


def _digit(power: int) -> Values:
    return lambda source, numbers: (numbers // BASE**power % BASE + 1).float()


def _signs(seed: int) -> Values:
    def values(source: Source, numbers: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(source.start * _NUM_SIGNS + seed)
        return torch.randint(2, numbers.shape, generator=generator).mul(2).sub(1).float()

    return values


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

"""Tensor origin: for every element of a port tensor the number of the source element that landed there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from minimax_tools.capture.digests import dtype_name
from neuron.weight_trace.port_tensors import ELEMENTS_AT_ONCE, Snapshot, TensorPart
from neuron.weight_trace.source_tensors import SourceTensor, SourceTensors

# In place of a number: no source element landed, several did, or one of an expert outside the sample.
CONSTANT, COMPUTED, NOT_SAMPLED = -1, -2, -3

# Sixteen digits are exact even in FP8, and survive a scale in BF16.
BASE = 16
# Largest error of a digit after a scale and a rounding to BF16, where digits are whole numbers.
_DIGIT_SLACK = 0.3
# Relative error of a probe that is still a rounding, to four bits or more. A larger one means another element.
_MAX_ROUNDING = 0.08
# Above this share of computed elements all count as computed: a mean of two numbers sometimes equals a third one.
_MAX_COMPUTED_SHARE = 0.25
# The estimate of a number of mixed elements comes from 16 random passes: search from 0.7 to 1.4 times of it.
_MIN_COUNT_FACTOR, _MAX_COUNT_FACTOR = 0.7, 1.4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorOrigin:
    """Origins of a port tensor's elements.

    Args:
        numbers: Source numbers, int64, of the tensor's shape or of its traced part: `CONSTANT` for no source element,
            `COMPUTED` for several, `NOT_SAMPLED` for one of an expert that is not traced.
        gain: Factor of the landed elements; None where it differs between them.
        offset: Number added to the landed elements; None where it differs between them.
        rounding: Largest relative error of the landed elements after gain and offset are undone; 0 if exact.
        rounding_float32: Largest relative error of those whose source is float32 in every run.
        constant: Value of the constant elements; None where it differs between them.
        weight_sum: Mean sum of the weights in a computed element.
        num_mixed: Source elements in a computed element, if their weights are equal; None where it is unknown, for
            example because the conversion is not linear.
        mixed_kinds: Kinds of source tensors that the computed elements depend on.
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
    def has_landed(self) -> bool:
        """True if a source element landed here."""
        return bool((self.numbers >= 0).any())

    @property
    def num_computed(self) -> int:
        """Number of computed elements."""
        return int((self.numbers == COMPUTED).sum())

    @property
    def num_constant(self) -> int:
        """Number of elements that do not depend on the checkpoint."""
        return int((self.numbers == CONSTANT).sum())

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {dtype_name(self.dtype)}"


def probe_values(source: SourceTensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return pseudo-random values in [1,2), float32, with as many bits as the tensor's dtype keeps."""
    return _float32_probe(numbers) if source.is_float32 else _bf16_probe(numbers)


def _float32_probe(numbers: torch.Tensor) -> torch.Tensor:
    # A multiplicative hash: neighbours must not have similar values.
    mixed = (numbers * 2654435761 + 40503) % (1 << 32)
    mixed = ((mixed >> 15) ^ mixed) * 2246822519 % (1 << 32)
    return ((1 << 23) + (mixed >> 9)).float() / (1 << 23)


def _bf16_probe(numbers: torch.Tensor) -> torch.Tensor:
    return _float32_probe(numbers).bfloat16().float()


class OriginRecorder:
    """Collector of what each pass shows of one port tensor.

    It keeps the values of the first two passes, in the tensor's own dtype, and a number and flags for each element.

    Args:
        ones: The tensor after the pass in which every source element is 1.
        twos: The tensor after the pass in which every source element is 2.
    """

    def __init__(self, name: str, part: TensorPart, ones: Snapshot, twos: torch.Tensor) -> None:
        self.name = name
        self._full_shape = tuple(twos.shape)
        self._part = part
        first, second = part.of_snapshot(ones), part.of(twos)
        self._shape, self._dtype = tuple(first.shape), first.dtype
        self._first = first.reshape(-1).clone()
        self._second = second.reshape(-1).clone()
        count = self._first.numel()
        self._numbers = torch.zeros(count, dtype=torch.int64)
        self._is_constant = torch.zeros(count, dtype=torch.bool)
        self._is_computed = torch.zeros(count, dtype=torch.bool)
        self._is_unsampled = torch.zeros(count, dtype=torch.bool)
        for chunk in self._chunks():
            gain, _ = self._gain_and_offset(chunk)
            self._is_constant[chunk] = (gain == 0) | ~torch.isfinite(gain)
        self._rounding = self._rounding_float32 = 0.0
        # Of computed elements alone: their indices, and the results of the passes of random signs.
        self._mixed = torch.empty(0, dtype=torch.int64)
        self._square_sum = torch.empty(0, dtype=torch.float64)
        self._last_signs = torch.empty(0, dtype=torch.float64)
        self._num_sign_passes = 0
        self._kinds: list[str] = []

    @property
    def has_computed(self) -> bool:
        """True if some element is computed from several source elements."""
        return bool(self._is_computed.any())

    def take_unsampled(self, tensor: torch.Tensor) -> None:
        """Record a pass of ones in which only the experts outside the sample differ."""
        for chunk, values in self._split(tensor):
            changed = values != self._first[chunk].double()
            self._is_unsampled[chunk] = self._is_constant[chunk] & changed

    def take_digit(self, tensor: torch.Tensor) -> None:
        """Record the pass of the next digit, the highest first."""
        for chunk, values in self._split(tensor):
            self._mark_late_changes(chunk, values)
            gain, offset = self._gain_and_offset(chunk)
            shown = (values - offset) / gain - 1
            digit = shown.round()
            is_digit = ((shown - digit).abs() < _DIGIT_SLACK) & (digit >= 0) & (digit < BASE)
            self._is_computed[chunk] |= ~is_digit & ~self._is_constant[chunk]
            self._numbers[chunk] = self._numbers[chunk] * BASE + torch.where(is_digit, digit, 0).long()

    def verify(self, tensor: torch.Tensor, sources: SourceTensors) -> None:
        """Check the numbers by the pass of probes: each element must hold the probe of its number."""
        source_is_float32 = torch.tensor([source.is_float32 for source in sources.all])
        rounding = rounding_float32 = 0.0
        for chunk, values in self._split(tensor):
            self._mark_late_changes(chunk, values)
            is_constant = self._is_constant[chunk]
            is_computed = self._is_computed[chunk] | ((self._numbers[chunk] >= sources.size) & ~is_constant)
            numbers = self._numbers[chunk].clamp(max=sources.size - 1)
            is_float32 = source_is_float32[sources.find(numbers)]
            expected = torch.where(is_float32, _float32_probe(numbers), _bf16_probe(numbers)).double()
            gain, offset = self._gain_and_offset(chunk)
            error = (((values - offset) / gain - expected).abs() / expected).nan_to_num(nan=1.0)
            is_computed |= (error > _MAX_ROUNDING) & ~is_constant
            self._is_computed[chunk] = is_computed
            is_single = ~is_constant & ~is_computed
            rounding = max(rounding, _largest(error[is_single]))
            rounding_float32 = max(rounding_float32, _largest(error[is_single & is_float32]))
        if int(self._is_computed.sum()) > _MAX_COMPUTED_SHARE * int((~self._is_constant).sum()):
            self._is_computed = ~self._is_constant
        else:
            self._rounding, self._rounding_float32 = rounding, rounding_float32

    def take_signs(self, tensor: torch.Tensor) -> None:
        """Record one pass of random signs."""
        if self._num_sign_passes == 0:
            gain, _ = self._gain_and_offset(slice(None))
            is_mixed = self._is_computed & (gain != 0) & torch.isfinite(gain)
            self._mixed = is_mixed.nonzero().flatten()
            self._square_sum = torch.zeros(len(self._mixed), dtype=torch.float64)
        gain, offset = self._gain_and_offset(self._mixed)
        shown = self._part.of(tensor).reshape(-1)[self._mixed].double() - offset
        self._square_sum += shown**2
        self._last_signs = shown / gain
        self._num_sign_passes += 1

    def take_kind(self, kind: str, tensor: torch.Tensor) -> None:
        """Record a pass of ones in which only tensors of one kind differ."""
        for chunk, values in self._split(tensor):
            if bool((values != self._first[chunk].double())[self._is_computed[chunk]].any()):
                self._kinds.append(kind)
                return

    def result(self) -> TensorOrigin:
        """Return the origin that all passes together show."""
        numbers = self._numbers
        numbers[self._is_constant] = CONSTANT
        numbers[self._is_computed] = COMPUTED
        numbers[self._is_unsampled] = NOT_SAMPLED
        weight_sum = num_mixed = None
        if len(self._mixed):
            gain, _ = self._gain_and_offset(self._mixed)
            weight_sum = float(gain.mean())
            mean_square = float(self._square_sum.mean()) / self._num_sign_passes
            if mean_square > 0:
                num_mixed = _count_mixed(self._last_signs, float((gain**2).mean()) / mean_square)
        return TensorOrigin(
            name=self.name,
            shape=self._full_shape,
            dtype=self._dtype,
            numbers=numbers.reshape(self._shape),
            gain=self._common_value(lambda chunk: self._gain_and_offset(chunk)[0][numbers[chunk] >= 0]),
            offset=self._common_value(lambda chunk: self._gain_and_offset(chunk)[1][numbers[chunk] >= 0]),
            rounding=self._rounding,
            rounding_float32=self._rounding_float32,
            constant=self._common_value(
                lambda chunk: self._first[chunk].double()[numbers[chunk] == CONSTANT]
            ),
            weight_sum=weight_sum,
            num_mixed=num_mixed,
            mixed_kinds=tuple(self._kinds),
        )

    def _mark_late_changes(self, chunk: slice, values: torch.Tensor) -> None:
        """Mark elements as computed that were equal in the first two passes and change now."""
        first = self._first[chunk].double()
        changes = self._is_constant[chunk] & (values != first) & ~(values.isnan() & first.isnan())
        self._is_constant[chunk] &= ~changes
        self._is_computed[chunk] |= changes

    def _gain_and_offset(self, chunk: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Solve first = gain + offset and second = 2·gain + offset, in float64."""
        first = self._first[chunk].double()
        gain = self._second[chunk].double() - first
        return gain, first - gain

    def _chunks(self) -> list[slice]:
        starts = range(0, self._first.numel(), ELEMENTS_AT_ONCE)
        return [slice(start, start + ELEMENTS_AT_ONCE) for start in starts]

    def _split(self, tensor: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        flat = self._part.of(tensor).reshape(-1)
        for chunk in self._chunks():
            yield chunk, flat[chunk].double()

    def _common_value(self, values_of: Callable[[slice], torch.Tensor]) -> float | None:
        """Return the one value that all elements have; None where they differ or there are none."""
        found = None
        for chunk in self._chunks():
            values = values_of(chunk)
            if not values.numel():
                continue
            found = float(values[0]) if found is None else found
            if not bool((values == found).all()):
                return None
        return found


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _count_mixed(values: torch.Tensor, estimate: float) -> float:
    """Return the n closest to the estimate of which `values` can be means of n signs: multiples of 2/n from 1."""

    def error_of(count: int) -> float:
        steps = (1 - values) * count / 2
        return float((steps - steps.round()).abs().max())

    counts = range(max(1, int(estimate * _MIN_COUNT_FACTOR)), int(estimate * _MAX_COUNT_FACTOR) + 2)
    fitting = [count for count in counts if error_of(count) < _DIGIT_SLACK]
    return min(fitting, key=lambda count: abs(count - estimate)) if fitting else estimate

"""Origin recorder: collects, pass by pass, which source element landed at each element of one port tensor.

A pass loads the port with a value for every source element, such as 1; `origin_tracer` lists the passes. Every source
element has a number, which the passes of digits spell. An element is `gain · source + offset`: the passes of ones and
twos give both. An element that is equal in these two passes is constant until a later pass changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from minimax_tools.machine.compiled import compiled
from neuron.weight_trace.port_tensors import ELEMENTS_AT_ONCE, Snapshot, TensorPart
from neuron.weight_trace.source_tensors import SourceTensor, SourceTensors
from neuron.weight_trace.tensor_origin import COMPUTED, CONSTANT, NOT_SAMPLED, TensorOrigin

Values = np.ndarray[tuple[int], np.dtype[np.float64]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

# Numbers are written in digits of 0 to 15: with 1 added, all are exact even in FP8, and survive a scale in BF16.
DIGIT_BITS = 4
BASE = 1 << DIGIT_BITS
# The low 32 bits of an integer: a mask, as a remainder takes many times as long.
_LOW_BITS = (1 << 32) - 1
# Largest error of a digit, a whole number, after a scale and a rounding to BF16.
_DIGIT_SLACK = 0.3
# Largest relative error of a probe that was rounded, to four bits or more. A larger error means another element.
_MAX_ROUNDING = 0.08
# Above this share of computed elements all count as computed: a mean of two numbers sometimes equals a third one.
_MAX_COMPUTED_SHARE = 0.25
# The number of mixed elements is estimated from 16 random passes: search from 0.7 to 1.4 times the estimate.
_MIN_COUNT_FACTOR, _MAX_COUNT_FACTOR = 0.7, 1.4


def probe_values(source: SourceTensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return pseudo-random values in [1,2] for source elements by number, float32, of the bits that `source` keeps."""
    return _float32_probe(numbers) if source.is_float32 else _bf16_probe(numbers)


def _float32_probe(numbers: torch.Tensor) -> torch.Tensor:
    # A multiplicative hash: neighbours must not have similar values.
    mixed = (numbers * 2654435761 + 40503) & _LOW_BITS
    mixed = (((mixed >> 15) ^ mixed) * 2246822519) & _LOW_BITS
    return ((1 << 23) + (mixed >> 9)).float() / (1 << 23)


def _bf16_probe(numbers: torch.Tensor) -> torch.Tensor:
    return _float32_probe(numbers).bfloat16().float()


class OriginRecorder:
    """A record of what each pass shows of one port tensor.

    It keeps the values of the first two passes, in the tensor's own dtype, and flags and a source number per element.

    Args:
        part: The part of the port tensor that is traced.
        ones: A copy of the port tensor after the pass in which every source element is 1: the next pass overwrites it.
        twos: The port tensor, whole, after the pass in which every source element is 2.
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
        # Of the computed elements: their indices, the sum of their squares over the sign passes, and their values in
        # the last sign pass divided by the gain.
        self._computed_indices = torch.empty(0, dtype=torch.int64)
        self._square_sum = torch.empty(0, dtype=torch.float64)
        self._last_signs = torch.empty(0, dtype=torch.float64)
        self._num_sign_passes = 0
        self._mixed_kinds: list[str] = []

    @property
    def has_computed(self) -> bool:
        """True if an element is computed from several source elements."""
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
            _append_digits(
                values.numpy(),
                self._first[chunk].double().numpy(),
                self._second[chunk].double().numpy(),
                self._is_constant[chunk].numpy(),
                self._is_computed[chunk].numpy(),
                self._numbers[chunk].numpy(),
            )

    def verify(self, tensor: torch.Tensor, *, sources: SourceTensors) -> None:
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
            # A constant has gain 0, so its error may be NaN; it is left out below.
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
            is_usable = self._is_computed & (gain != 0) & torch.isfinite(gain)
            self._computed_indices = is_usable.nonzero().flatten()
            self._square_sum = torch.zeros(len(self._computed_indices), dtype=torch.float64)
        gain, offset = self._gain_and_offset(self._computed_indices)
        signed_sum = self._part.of(tensor).reshape(-1)[self._computed_indices].double() - offset
        self._square_sum += signed_sum**2
        self._last_signs = signed_sum / gain
        self._num_sign_passes += 1

    def take_kind(self, tensor: torch.Tensor, *, kind: str) -> None:
        """Record a pass of ones in which only tensors of one kind differ."""
        for chunk, values in self._split(tensor):
            if bool((values != self._first[chunk].double())[self._is_computed[chunk]].any()):
                self._mixed_kinds.append(kind)
                return

    def result(self) -> TensorOrigin:
        """Return the origin that all passes together show."""
        numbers = self._numbers
        numbers[self._is_constant] = CONSTANT
        numbers[self._is_computed] = COMPUTED
        numbers[self._is_unsampled] = NOT_SAMPLED
        weight_sum = num_mixed = None
        if len(self._computed_indices):
            mixing, _ = self._gain_and_offset(self._computed_indices)
            weight_sum = float(mixing.mean())
            # With random signs the mean square of a computed value is the sum of its squared weights. For n equal
            # weights w that is n·w², and gain² is (n·w)²: their ratio estimates n.
            mean_square = float(self._square_sum.mean()) / self._num_sign_passes
            if mean_square > 0:
                num_mixed = _count_mixed(self._last_signs, float((mixing**2).mean()) / mean_square)
        gain = self._common_value(lambda chunk: self._gain_and_offset(chunk)[0][numbers[chunk] >= 0])
        gains = None
        if gain is None and bool((numbers >= 0).any()):
            gains = torch.cat([self._gain_and_offset(chunk)[0].float() for chunk in self._chunks()])
        return TensorOrigin(
            name=self.name,
            shape=self._full_shape,
            dtype=self._dtype,
            numbers=numbers.reshape(self._shape),
            gain=gain,
            gains=None if gains is None else gains.reshape(self._shape),
            offset=self._common_value(lambda chunk: self._gain_and_offset(chunk)[1][numbers[chunk] >= 0]),
            rounding=self._rounding,
            rounding_float32=self._rounding_float32,
            constant=self._common_value(
                lambda chunk: self._first[chunk].double()[numbers[chunk] == CONSTANT]
            ),
            weight_sum=weight_sum,
            num_mixed=num_mixed,
            mixed_kinds=tuple(self._mixed_kinds),
        )

    def _mark_late_changes(self, chunk: slice, values: torch.Tensor) -> None:
        """Mark as computed the elements that were equal in the first two passes and differ in this one."""
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
            yield chunk, flat[chunk].double().contiguous()

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


@compiled("(float64[::1], float64[::1], float64[::1], boolean[::1], boolean[::1], int64[::1])")
def _append_digits(
    values: Values, first: Values, second: Values, is_constant: Flags, is_computed: Flags, numbers: Numbers
) -> None:
    """Append to each number the digit that its element's value tells; where it tells none, mark it as computed."""
    for i in range(values.size):
        gain = second[i] - first[i]
        # The pass loads digits plus 1; an offset is added to both.
        exact_digit = (values[i] - first[i]) / gain
        digit = np.rint(exact_digit)
        is_digit = abs(exact_digit - digit) < _DIGIT_SLACK and 0 <= digit < BASE
        is_computed[i] |= not is_digit and not is_constant[i]
        numbers[i] = numbers[i] * BASE + (np.int64(digit) if is_digit else 0)


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _count_mixed(values: torch.Tensor, estimate: float) -> float:
    """Return the n closest to the estimate for which all `values` can be means of n signs; else the estimate."""

    def error_of(count: int) -> float:
        # A mean of n signs lies a whole number of steps of 2/n below 1.
        steps = (1 - values) * count / 2
        return float((steps - steps.round()).abs().max())

    counts = range(max(1, int(estimate * _MIN_COUNT_FACTOR)), int(estimate * _MAX_COUNT_FACTOR) + 2)
    fitting = [count for count in counts if error_of(count) < _DIGIT_SLACK]
    return min(fitting, key=lambda count: abs(count - estimate)) if fitting else estimate

"""Origin tracer: runs a port's conversion on generated tensors and reads where every source element landed.

A source element is an element of the checkpoint's layer, numbered by `source_tensors`. A pass loads the port once, and
its `OriginRecorder`s read the values that the port then holds. The passes run in this order:

| pass | every source element is | shows |
|---|---|---|
| ones, twos | 1, then 2 | gain and offset of each element, and constants |
| unsampled | 1; 3 for experts that are not traced | elements of those experts |
| digits | a digit of its own number, plus 1 | the number of the element that landed, digit by digit |
| probes | a hash of its own number | whether the number was read correctly |
| signs | 1 or -1 at random | how many elements a computed value mixes |
| kinds | 1; probes for one kind of tensors | the kinds that a computed value depends on |

The last two run only where a port computes values. An element is `gain · source + offset`; one that is equal in the
first two passes is constant until a later pass changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.machine.compiled import compiled
from neuron.weight_trace.port_tensors import ELEMENTS_AT_ONCE, Snapshot, TensorPart
from neuron.weight_trace.source_tensors import (
    COMPUTED,
    CONSTANT,
    NOT_SAMPLED,
    MakeTensor,
    SourceTensor,
    SourceTensors,
    TensorOrigin,
)

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
# Most elements whose mean is told from another number: with more, its steps vanish in the rounding to BF16.
_MOST_MIXED = 256


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
    """A record of what each pass shows of one port tensor, or of the `part` of it that is traced.

    `ones` and `twos` are the port tensor after the passes in which every source element is 1, and 2.
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
        self._weight_sum: float | None = None
        self._num_mixed: int | None = None
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
        """Record the pass of random signs: how many elements the computed ones mix, with which sum of weights."""
        gain, offset = self._gain_and_offset(slice(None))
        is_usable = self._is_computed & (gain != 0) & torch.isfinite(gain)
        if not bool(is_usable.any()):
            return
        gain, offset = gain[is_usable], offset[is_usable]
        signed_sum = self._part.of(tensor).reshape(-1)[is_usable].double() - offset
        self._weight_sum = float(gain.mean())
        self._num_mixed = _count_mixed(signed_sum / gain)

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
            weight_sum=self._weight_sum,
            num_mixed=self._num_mixed,
            mixed_kinds=tuple(self._mixed_kinds),
        )

    def _mark_late_changes(self, chunk: slice, values: torch.Tensor) -> None:
        """Mark as computed the elements that were equal in the first two passes and differ in this one."""
        first = self._first[chunk].double()
        changes = self._is_constant[chunk] & (values != first) & ~(values.isnan() & first.isnan())
        self._is_constant[chunk] &= ~changes
        self._is_computed[chunk] |= changes

    def _gain_and_offset(self, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
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


def _count_mixed(values: torch.Tensor) -> int | None:
    """Return the smallest n for which all `values` can be means of n signs; None if there is none."""
    for count in range(1, _MOST_MIXED + 1):
        # A mean of n signs lies a whole number of steps of 2/n below 1.
        steps = (1 - values) * count / 2
        if float((steps - steps.round()).abs().max()) < _DIGIT_SLACK:
            return count
    return None


# Loads generated tensors into the port, and returns every tensor that it then holds, by name; the next load overwrites
# them.
LoadGenerated = Callable[[MakeTensor], Mapping[str, torch.Tensor]]
# Returns values of a source tensor in one pass, from the numbers [n] of some of its elements. A value without dims
# stands for all of them.
PassValues = Callable[[SourceTensor, torch.Tensor], torch.Tensor]
# Lets a recorder take its port tensor after a pass.
TakePass = Callable[[OriginRecorder, torch.Tensor], None]

# Neither 1 nor 2, so that a change from the pass of ones shows.
_UNSAMPLED_VALUE = 3.0


class OriginTracer:
    """A trace of a port's conversion.

    `sources` are the traced tensors, `shapes` those of all tensors of the layer; `load` loads generated ones into the
    port.
    """

    def __init__(
        self,
        sources: SourceTensors,
        shapes: Mapping[str, tuple[int, ...]],
        load: LoadGenerated,
        *,
        pool: ReadingPool,
    ) -> None:
        self._sources = sources
        self._shapes = shapes
        self._load = load
        self._pool = pool
        self._recorders: dict[str, OriginRecorder] = {}

    def trace(self) -> list[TensorOrigin]:
        """Return the origin of every port tensor, in the module's order.

        Tensors that hold only experts outside the sample are left out, unless they hold constants too.
        """
        self._start_recorders()
        num_digits = 1
        while BASE**num_digits < self._sources.size:
            num_digits += 1
        # A recorder takes the highest digit first.
        for power in reversed(range(num_digits)):
            self._pass(_digit(power), OriginRecorder.take_digit)
        self._pass(probe_values, partial(OriginRecorder.verify, sources=self._sources))
        if any(recorder.has_computed for recorder in self._recorders.values()):
            self._trace_computed()
        # Each recorder is freed before the next origin is made.
        return [self._recorders.pop(name).result() for name in list(self._recorders)]

    def _start_recorders(self) -> None:
        """Run the passes of ones, of twos, and of experts that are not traced; start a recorder per port tensor."""
        ones = {name: Snapshot.of(tensor) for name, tensor in self._run(_constant(1)).items()}
        unchanged: dict[str, Snapshot] = {}
        for name, tensor in self._run(_constant(2)).items():
            snapshot = ones.pop(name, None)
            if snapshot is None or snapshot.shape != tensor.shape:
                # A tensor that loading makes anew has no fixed elements to trace.
                continue
            part = self._choose_part(snapshot, tensor)
            if part is None:
                unchanged[name] = snapshot
                part = TensorPart.first_element(tensor)
            self._recorders[name] = OriginRecorder(name, part, snapshot, tensor)
        if self._traces_all:
            return
        for name, tensor in self._run(_constant(1), unsampled=_UNSAMPLED_VALUE).items():
            if name in unchanged and unchanged[name].has_changed(tensor):
                # It holds only experts outside the sample.
                del self._recorders[name]
            elif name in self._recorders:
                self._recorders[name].take_unsampled(tensor)

    @property
    def _traces_all(self) -> bool:
        return len(self._sources.all) == len(self._shapes)

    def _choose_part(self, ones: Snapshot, twos: torch.Tensor) -> TensorPart | None:
        """Return the part to trace; None for a tensor of equal elements that did not change."""
        if self._traces_all or twos.dim() == 0:
            return TensorPart.whole(twos)
        part = TensorPart.changed(ones, twos)
        if part is None and ones.values.dim():
            # Constants that differ from each other (the snapshot of equal values has no dims): the whole is shown.
            return TensorPart.whole(twos)
        return part

    def _trace_computed(self) -> None:
        """Run the passes of signs and of kinds."""
        self._pass(_random_signs, OriginRecorder.take_signs)
        for kind in dict.fromkeys(source.kind for source in self._sources.all):
            self._pass(_ones_except(kind), partial(OriginRecorder.take_kind, kind=kind))

    def _pass(self, values_of: PassValues, take: TakePass) -> None:
        """Run one pass, and let every recorder take its port tensor, each in a thread."""
        tensors = self._run(values_of)
        self._pool.start(
            partial(take, recorder, tensors[name])
            for name, recorder in self._recorders.items()
            if name in tensors
        ).finish()

    def _run(self, values_of: PassValues, *, unsampled: float = 1.0) -> Mapping[str, torch.Tensor]:
        """Return every port tensor after one pass; elements of experts that are not traced are `unsampled`."""

        def make(name: str) -> torch.Tensor:
            source = self._sources.get(name)
            if source is None:
                return torch.tensor(unsampled).expand(self._shapes[name])
            return _make_values(source, values_of)

        return self._load(make)


def _make_values(source: SourceTensor, values_of: PassValues) -> torch.Tensor:
    """Make a source tensor's values, float32; a single value that stands for all is expanded."""
    stop = source.start + source.size
    made = torch.empty(source.size)
    for start in range(source.start, stop, ELEMENTS_AT_ONCE):
        values = values_of(source, torch.arange(start, min(start + ELEMENTS_AT_ONCE, stop)))
        if values.dim() == 0:
            return values.expand(source.shape)
        made[start - source.start :][: len(values)] = values
    return made.reshape(source.shape)


def _constant(value: int) -> PassValues:
    return lambda source, numbers: torch.tensor(float(value))


def _ones_except(kind: str) -> PassValues:
    """Return ones everywhere, and probes for tensors of one kind."""
    return lambda source, numbers: probe_values(source, numbers) if source.kind == kind else torch.tensor(1.0)


def _digit(power: int) -> PassValues:
    # Shifts, as a division of integers takes many times as long.
    return lambda source, numbers: ((numbers >> power * DIGIT_BITS) & (BASE - 1)).add(1).float()


def _random_signs(source: SourceTensor, numbers: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(numbers[0]))
    return torch.randint(2, numbers.shape, generator=generator).mul(2).sub(1).float()

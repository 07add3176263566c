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

The last two run only where a port computes values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from minimax_tools.checkpoint.filling import ReadingPool
from neuron.weight_trace.generated_tensors import MakeTensor
from neuron.weight_trace.origin_recorder import BASE, DIGIT_BITS, OriginRecorder, probe_values
from neuron.weight_trace.port_tensors import ELEMENTS_AT_ONCE, Snapshot, TensorPart
from neuron.weight_trace.source_tensors import SourceTensor, SourceTensors
from neuron.weight_trace.tensor_origin import TensorOrigin

# Loads generated tensors into the port, and returns every tensor that it then holds, by name; the next load overwrites
# them.
LoadGenerated = Callable[[MakeTensor], Mapping[str, torch.Tensor]]
# Returns values of a source tensor in one pass, from the numbers [n] of some of its elements. A value without dims
# stands for all of them.
PassValues = Callable[[SourceTensor, torch.Tensor], torch.Tensor]
# Lets a recorder take its port tensor after a pass.
TakePass = Callable[[OriginRecorder, torch.Tensor], None]

# More sign passes give a better estimate of how many elements are mixed: its error is about 1/√16 of one pass's.
_NUM_SIGN_PASSES = 16
# Neither 1 nor 2, so that a change from the pass of ones shows.
_UNSAMPLED_VALUE = 3.0


class OriginTracer:
    """A trace of a port's conversion.

    Args:
        sources: The traced tensors: all tensors of a layer, or those of a sample.
        shapes: Shapes of all tensors of the layer, by name.
        load: Loads generated tensors into the port.
        pool: Threads that record what a pass shows, one port tensor each.
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

        Raises:
            TargetError: The port's conversion raised, or its result does not fit the module.
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
        for seed in range(_NUM_SIGN_PASSES):
            self._pass(_signs(seed), OriginRecorder.take_signs)
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


def _signs(seed: int) -> PassValues:
    def values(source: SourceTensor, numbers: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(numbers[0]) * _NUM_SIGN_PASSES + seed)
        return torch.randint(2, numbers.shape, generator=generator).mul(2).sub(1).float()

    return values

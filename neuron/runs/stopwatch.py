"""Stopwatch: where the time of one run of a layer goes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from minimax_tools.checkpoint.reader import CheckpointReader
from neuron.devices.runtime import Runtime
from neuron.devices.weights import WeightLoader
from neuron.runs.layer_times import LayerTimes


class Stopwatch:
    """Made before a run, told when the weights are there and when it ran, asked after it.

    Args:
        runtime: Counts what was compiled.
        reader: Knows what was read.
        loader: Knows what was sent.
    """

    def __init__(self, runtime: Runtime, reader: CheckpointReader, loader: WeightLoader) -> None:
        self._runtime, self._reader, self._loader = runtime, reader, loader
        self._began = self._marks()

    def loaded(self) -> None:
        """The weights are there."""
        self._loaded = self._marks()

    def ran(self) -> None:
        """The forward pass has been computed."""
        self._ran = self._marks()

    def times(self) -> LayerTimes:
        """Threads read side by side: what they did counts by its share of the time by the clock."""
        loading = self._loaded - self._began
        running = self._ran - self._loaded
        on_host_s = max(0.0, loading.clock_s - loading.sending_s - loading.compile_s)
        read_s = on_host_s * loading.reading_s / max(loading.weighing_s, on_host_s, 1e-9)
        return LayerTimes(
            read_s=read_s,
            regroup_s=on_host_s - read_s,
            transfer_s=loading.sending_s,
            compile_s=loading.compile_s + running.compile_s,
            run_s=max(0.0, running.clock_s - running.compile_s),
            copy_back_s=time.perf_counter() - self._ran.clock_s,
        )

    def _marks(self) -> _Marks:
        return _Marks(
            clock_s=time.perf_counter(),
            reading_s=self._reader.reading_s,
            weighing_s=self._reader.weighing_s,
            sending_s=self._loader.sending_s,
            compile_s=self._runtime.count_compiles().seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    """What the clocks say at one moment."""

    clock_s: float
    reading_s: float
    weighing_s: float
    sending_s: float
    compile_s: float

    def __sub__(self, earlier: _Marks) -> _Marks:
        return _Marks(
            clock_s=self.clock_s - earlier.clock_s,
            reading_s=self.reading_s - earlier.reading_s,
            weighing_s=self.weighing_s - earlier.weighing_s,
            sending_s=self.sending_s - earlier.sending_s,
            compile_s=self.compile_s - earlier.compile_s,
        )

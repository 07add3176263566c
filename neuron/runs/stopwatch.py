"""LayerStopwatch: measures the time of one run of a layer, by phase."""

from __future__ import annotations

import time
from typing import NamedTuple

from minimax_tools.checkpoint.reader import CheckpointReader
from neuron.devices.runtime import Runtime
from neuron.devices.weights import WeightLoader
from neuron.runs.layer_times import LayerTimes


class LayerStopwatch:
    """A stopwatch that starts when it is made; `mark_loaded` and `mark_computed` come in this order, then `times`.

    The runtime counts the seconds of compiling, the loader those of sending weights to the device, and the reader those
    of converting, reading included, summed over its threads. What is read while a layer computes counts nowhere.
    """

    def __init__(self, runtime: Runtime, reader: CheckpointReader, loader: WeightLoader) -> None:
        self._runtime, self._reader, self._loader = runtime, reader, loader
        self._started = self._read_counters()

    def mark_loaded(self) -> None:
        """Note that the weights are loaded."""
        self._loaded = self._read_counters()

    def mark_computed(self) -> None:
        """Note that the forward pass has been computed: the device is synchronised."""
        self._computed = self._read_counters()

    def times(self) -> LayerTimes:
        """Divide the time until now among the phases; called when the results are on the host."""
        loading = self._loaded.since(self._started)
        computing = self._computed.since(self._loaded)
        host_s = max(0.0, loading.clock_s - loading.sending_s - loading.compile_s)
        # Parallel threads convert for more seconds than pass: then reading gets its share of `host_s`, else its own
        # seconds. The tiny number avoids 0 ∕ 0.
        read_s = host_s * loading.reading_s / max(loading.converting_s, host_s, 1e-9)
        return LayerTimes(
            read_s=read_s,
            regroup_s=host_s - read_s,
            transfer_s=loading.sending_s,
            compile_s=loading.compile_s + computing.compile_s,
            run_s=max(0.0, computing.clock_s - computing.compile_s),
            copy_back_s=time.perf_counter() - self._computed.clock_s,
        )

    def _read_counters(self) -> _Counters:
        return _Counters(
            clock_s=time.perf_counter(),
            reading_s=self._reader.reading_s,
            converting_s=self._reader.converting_s,
            sending_s=self._loader.sending_s,
            compile_s=self._runtime.count_compiles().seconds,
        )


class _Counters(NamedTuple):
    """The clock and all counters at one moment, in seconds; `converting_s` includes `reading_s`."""

    clock_s: float
    reading_s: float
    converting_s: float
    sending_s: float
    compile_s: float

    def since(self, earlier: _Counters) -> _Counters:
        return _Counters(*(now_s - then_s for now_s, then_s in zip(self, earlier, strict=True)))

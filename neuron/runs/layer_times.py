"""LayerTimes: where the time of one layer goes, and what memory it takes at most."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minimax_tools.checkpoint.reader import CheckpointReader
from neuron.devices.runtime import Runtime
from neuron.devices.weights import WeightLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds by the clock, of one layer or of several together.

    Args:
        read_s: Bytes from the disk or its cache.
        regroup_s: Making them the port's weights: dequantised, cut, put together, converted.
        transfer_s: Weights on their way to the device.
        compile_s: Graphs compiled.
        run_s: The forward passes, compiling aside.
        copy_back_s: What they gave, on its way to the host.
    """

    read_s: float = 0.0
    regroup_s: float = 0.0
    transfer_s: float = 0.0
    compile_s: float = 0.0
    run_s: float = 0.0
    copy_back_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return float(sum(dataclasses.astuple(self)))

    def by_phase(self) -> dict[str, float]:
        """Seconds by the name of each phase in words, such as `copy back`."""
        return {
            name.removesuffix("_s").replace("_", " "): value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def combined(cls, times: Sequence[LayerTimes], how: Callable[[list[float]], float]) -> LayerTimes:
        """Of each phase what `how` makes of all its times."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: how([getattr(one, name) for one in times]) for name in names})

    def __add__(self, other: LayerTimes) -> LayerTimes:
        return self.combined((self, other), sum)


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
        read_s = on_host_s * loading.reading_s / max(loading.converting_s, on_host_s, 1e-9)
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
            converting_s=self._reader.converting_s,
            sending_s=self._loader.sending_s,
            compile_s=self._runtime.count_compiles().seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    """What the clocks say at one moment."""

    clock_s: float
    reading_s: float
    converting_s: float
    sending_s: float
    compile_s: float

    def __sub__(self, earlier: _Marks) -> _Marks:
        return _Marks(
            clock_s=self.clock_s - earlier.clock_s,
            reading_s=self.reading_s - earlier.reading_s,
            converting_s=self.converting_s - earlier.converting_s,
            sending_s=self.sending_s - earlier.sending_s,
            compile_s=self.compile_s - earlier.compile_s,
        )

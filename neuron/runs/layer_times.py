"""LayerTimes: the time of one layer, by phase."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minimax_tools.checkpoint.reader import CheckpointReader
from neuron.devices.runtime import Runtime
from neuron.devices.weights import WeightLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Wall time of one layer, or the sum of several, in seconds.

    Args:
        read_s: Reading bytes from the disk or its cache.
        regroup_s: Making weights of them: dequantising, cutting, joining, converting.
        transfer_s: Copying weights to the device.
        compile_s: Compiling graphs.
        run_s: The forward passes, without compiling.
        copy_back_s: Copying the results to the host.
    """

    read_s: float = 0.0
    regroup_s: float = 0.0
    transfer_s: float = 0.0
    compile_s: float = 0.0
    run_s: float = 0.0
    copy_back_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of all phases."""
        return float(sum(dataclasses.astuple(self)))

    def by_phase(self) -> dict[str, float]:
        """Return the seconds of each phase, by its name in words, such as `copy back`."""
        return {
            name.removesuffix("_s").replace("_", " "): value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def combined(cls, times: Sequence[LayerTimes], how: Callable[[list[float]], float]) -> LayerTimes:
        """Combine each phase's times by a function, such as `sum`."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: how([getattr(one, name) for one in times]) for name in names})

    def __add__(self, other: LayerTimes) -> LayerTimes:
        return self.combined((self, other), sum)


class Stopwatch:
    """A stopwatch of one run of a layer, which starts when it is made.

    Args:
        runtime: Counts compile times.
        reader: Counts read times.
        loader: Counts transfer times.
    """

    def __init__(self, runtime: Runtime, reader: CheckpointReader, loader: WeightLoader) -> None:
        self._runtime, self._reader, self._loader = runtime, reader, loader
        self._began = self._marks()

    def loaded(self) -> None:
        """Note that the weights are loaded."""
        self._loaded = self._marks()

    def ran(self) -> None:
        """Note that the forward pass has been computed."""
        self._ran = self._marks()

    def times(self) -> LayerTimes:
        """Divide the wall time among the phases. Threads that read in parallel count by their share of it."""
        loading = self._loaded.since(self._began)
        running = self._ran.since(self._loaded)
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


class _Marks(NamedTuple):
    """The clocks at one moment."""

    clock_s: float
    reading_s: float
    converting_s: float
    sending_s: float
    compile_s: float

    def since(self, earlier: _Marks) -> _Marks:
        return _Marks(*(now_s - then_s for now_s, then_s in zip(self, earlier, strict=True)))

"""Profiler: time and memory of every layer of a run."""

from __future__ import annotations

import time
from types import TracebackType

from minimax_tools.machine.memory import MemoryTracker
from neuron.devices.runtime import Runtime
from neuron.runs.layer_times import LayerTimes
from neuron.runs.run_report import LayerProfile


class Profiler:
    """Keeps what each layer took; a context manager, since a thread samples the memory while its block runs.

    Args:
        runtime: The device.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tracker = MemoryTracker()
        self._began_s = time.perf_counter()
        self._layers: list[LayerProfile] = []

    def __enter__(self) -> Profiler:
        self._tracker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tracker.stop()

    @property
    def layers(self) -> tuple[LayerProfile, ...]:
        """The layers that ran, in the order in which they did."""
        return tuple(self._layers)

    def keep(self, layer: int, started_s: float, times: LayerTimes) -> None:
        """Keep what a layer took that ended now.

        Args:
            layer: The layer.
            started_s: When it began, as `time.perf_counter` tells it.
            times: Where its time went.
        """
        snapshot = self._tracker.snapshot(f"layer {layer}")
        self._layers.append(
            LayerProfile(
                layer=layer,
                started_s=started_s - self._began_s,
                times=times,
                peak_host_bytes=snapshot.peak_anonymous_bytes,
                peak_device_bytes=self._runtime.peak_memory_bytes(),
            )
        )

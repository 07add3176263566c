"""Progress of a run over layers: a bar in a terminal, a line per layer in a log.

A library reports to a `Progress`; the command makes the one that shows it:

    with LayerProgress(len(span), label="Golden") as progress:
        stream(..., progress=progress)
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from minimax_tools.machine.size import format_size

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

logger = logging.getLogger(__name__)

_REFRESHES_PER_SECOND = 4


class Progress(Protocol):
    """A receiver of the progress of a run over layers; any thread may call it."""

    def advance(self, layer: int, *, num_bytes: int) -> None:
        """Report a layer that is done, and the bytes of the checkpoint that were read for it."""

    def skip(self, layer: int) -> None:
        """Report a layer that an earlier run did; it does not count in rate and time left."""


class NoProgress:
    """A progress that shows nothing."""

    def advance(self, layer: int, *, num_bytes: int) -> None:
        """Do nothing."""

    def skip(self, layer: int) -> None:
        """Do nothing."""


class LayerProgress:
    """A progress that shows layer, bytes per second, memory in use and time left on stderr while its block runs.

    In a terminal it is a bar, and other output to `sys.stderr` appears above it. Elsewhere it is one log line per
    layer. Nothing is shown if this module's logger does not log INFO, as with `--quiet`.

    Args:
        num_layers: Number of layers of the run, those done before included.
        label: Text before the bar.
        unit: Name of one step, if a step is not a layer.
        clock: Function that returns a time in seconds.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        label: str = "Layers",
        unit: str = "layer",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_layers = num_layers
        self._label = label
        self._unit = unit
        self._clock = clock
        self._lock = threading.Lock()
        self._bar: Live | None = None
        self._layer: int | None = None
        # Layers done in all, and layers done by this run.
        self._num_done = 0
        self._num_fresh = 0
        self._num_bytes = 0
        self._begun_s = self._latest_s = self._clock()

    def __enter__(self) -> LayerProgress:
        self._begun_s = self._latest_s = self._clock()
        if logger.isEnabledFor(logging.INFO) and sys.stderr.isatty():
            self._start_bar()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def advance(self, layer: int, *, num_bytes: int) -> None:
        """Report a layer that is done, and the bytes of the checkpoint that were read for it."""
        with self._lock:
            self._layer = layer
            self._num_done += 1
            self._num_fresh += 1
            self._num_bytes += num_bytes
            self._latest_s = self._clock()
            line = f"{self._count_of(layer)}: {', '.join(self._figures())}"
        if self._bar is None:
            logger.info(line)

    def skip(self, layer: int) -> None:
        """Report a layer that an earlier run did; it does not count in rate and time left."""
        with self._lock:
            self._layer = layer
            self._num_done += 1
            if not self._num_fresh:
                # Time counts from the last layer done before: checking such layers says nothing about the next ones.
                self._begun_s = self._latest_s = self._clock()
            line = f"{self._count_of(layer)}: done before"
        if self._bar is None:
            logger.info(line)

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.live import Live

        # Lines of other output are not broken: a path in them can be copied whole.
        console = Console(file=sys.stderr, soft_wrap=True, highlight=False, markup=False)
        if not console.is_interactive:
            return
        self._bar = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,  # it carries results
        )
        self._bar.start()

    def _render(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            layer = [f"{self._unit} {self._layer}"] if self._layer is not None else []
            figures = " · ".join([f"{self._num_done}/{self._num_layers}", *layer, *self._figures()])
            bar = ProgressBar(total=self._num_layers, completed=self._num_done)
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(no_wrap=True, min_width=len(self._label))
        table.add_column(ratio=1, min_width=4)
        table.add_column(no_wrap=True)
        table.add_row(Text(self._label), bar, Text(figures))
        return table

    def _count_of(self, layer: int) -> str:
        return f"{self._unit.capitalize()} {layer} ({self._num_done} of {self._num_layers})"

    def _figures(self) -> list[str]:
        """Return time, rate and memory in use as texts, as far as known; a narrow terminal cuts off the last ones."""
        from minimax_tools.machine.memory import MemoryUsage

        figures = []
        spent_s = self._latest_s - self._begun_s
        num_left = self._num_layers - self._num_done
        if num_left <= 0:
            figures.append(f"took {format_duration(spent_s)}")
        elif self._num_fresh:
            layer_s = spent_s / self._num_fresh
            # Time already spent on the current layer, at most the mean: a slow layer must not count down later ones.
            current_s = min(self._clock() - self._latest_s, layer_s)
            figures.append(f"{format_duration(num_left * layer_s - current_s)} left")
        if self._num_bytes and spent_s > 0:
            figures.append(f"{format_size(int(self._num_bytes / spent_s))}/s")
        usage = MemoryUsage.current()
        figures.append(f"memory {format_size(usage.anonymous_bytes)}")
        if usage.device_bytes:
            figures.append(f"GPU {format_size(usage.all_devices_bytes)}")
        return figures


def format_duration(duration_s: float) -> str:
    """Return a duration as `4:15` (minutes:seconds), or `1:02:03` from one hour on."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

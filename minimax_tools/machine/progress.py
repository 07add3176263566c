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
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from minimax_tools.machine.size import format_size
from minimax_tools.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
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
        self._bar: ExitStack | None = None  # ends the bar; None without one
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
            self._bar.close()
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

        console = Console(file=sys.stderr)
        if not console.is_interactive:
            return
        # rich must not redirect: stdout carries results, and for stderr there is `AboveBar`.
        live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with ExitStack() as stack:
            stack.enter_context(live)
            stack.enter_context(AboveBar(sys.stderr, console=console))
            self._bar = stack.pop_all()

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


class AboveBar:
    """A stand-in for `sys.stderr` during its `with` block, while a bar is live: prints whole lines above the bar.

    rich's own stand-in does not serve, because click bypasses it and it breaks long lines.
    """

    def __init__(self, stream: TextIO, *, console: Console) -> None:
        self._stream = stream
        self._console = console
        # The last line as far as it was written.
        self._begun_line = ""
        # Reentrant: printing may write to `sys.stderr`.
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> AboveBar:
        sys.stderr = cast("TextIO", self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr = self._stream
        if self._begun_line:
            self.write("\n")

    def write(self, text: str) -> int:
        """Print the lines that `text` completes, and keep the rest for the next call."""
        from rich.text import Text

        if not isinstance(text, str):
            raise TypeError(f"a text stream takes str, not {type(text).__name__}")
        with self._lock:
            *lines, self._begun_line = (self._begun_line + text).split("\n")
            for line in lines:
                # Of a line that rewrote itself by carriage returns, the last state is printed.
                shown = Text.from_ansi(line.rstrip("\r").rpartition("\r")[2])
                shown.plain = printable(shown.plain)
                self._console.print(shown, soft_wrap=True)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all lines."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Do nothing: whole lines are printed already."""


def format_duration(duration_s: float) -> str:
    """Return a duration as `4:15` (minutes:seconds), or `1:02:03` from one hour on."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

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

from minimax_tools.machine.memory_usage import MemoryUsage
from minimax_tools.machine.size import format_size

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
    layer. Both need INFO of this module's logger, which `--quiet` switches off.

    Args:
        num_layers: Number of layers of the run, those done before included.
        label: Text before the bar.
        unit: Name of one step, if it is no layer.
        clock: Returns seconds.
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
        self._bar: ExitStack | None = None
        self._layer: int | None = None
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
            line = f"{self._place(layer)}: {', '.join(self._words())}"
        if self._bar is None:
            logger.info(line)

    def skip(self, layer: int) -> None:
        """Report a layer that an earlier run did; it does not count in rate and time left."""
        with self._lock:
            self._layer = layer
            self._num_done += 1
            if not self._num_fresh:
                # The time to check layers done before says nothing about the next ones.
                self._begun_s = self._latest_s = self._clock()
            line = f"{self._place(layer)}: done before"
        if self._bar is None:
            logger.info(line)

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stderr)
        if not console.is_interactive:
            return
        # No redirection by rich: stdout carries results, and click bypasses rich's stand-in for stderr.
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
            words = " · ".join([f"{self._num_done}/{self._num_layers}", *layer, *self._words()])
            bar = ProgressBar(total=self._num_layers, completed=self._num_done)
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(no_wrap=True, min_width=len(self._label))
        table.add_column(ratio=1, min_width=4)
        table.add_column(no_wrap=True)
        table.add_row(Text(self._label), bar, Text(words))
        return table

    def _place(self, layer: int) -> str:
        return f"{self._unit.capitalize()} {layer} ({self._num_done} of {self._num_layers})"

    def _words(self) -> list[str]:
        """Return time, rate and memory in use, as far as known; a narrow terminal cuts the last ones first."""
        words = []
        spent_s = self._latest_s - self._begun_s
        num_left = self._num_layers - self._num_done
        if num_left <= 0:
            words.append(f"took {word_duration(spent_s)}")
        elif self._num_fresh:
            layer_s = spent_s / self._num_fresh
            current_s = min(self._clock() - self._latest_s, layer_s)
            words.append(f"{word_duration(num_left * layer_s - current_s)} left")
        if self._num_bytes and spent_s > 0:
            words.append(f"{format_size(int(self._num_bytes / spent_s))}/s")
        usage = MemoryUsage.current()
        words.append(f"memory {format_size(usage.anonymous_bytes)}")
        if usage.device_bytes:
            words.append(f"GPU {format_size(usage.all_devices_bytes)}")
        return words


class AboveBar:
    """A stand-in for `sys.stderr` while a bar is live: prints every whole line above the bar.

    click bypasses rich's own stand-in, which also breaks long lines.
    """

    def __init__(self, stream: TextIO, *, console: Console) -> None:
        self._stream = stream
        self._console = console
        self._begun_line = ""
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
                # A line that rewrote itself shows its last state.
                self._console.print(Text.from_ansi(line.rstrip("\r").rpartition("\r")[2]), soft_wrap=True)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all lines."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Do nothing: whole lines are printed already."""


def word_duration(duration_s: float) -> str:
    """Return a duration as `4:15` (minutes:seconds), or `1:02:03` from one hour on."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

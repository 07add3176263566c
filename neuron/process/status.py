"""Status of this process, written to a record for its supervisor; without a supervisor, nothing is written.

State of the process that a port's code may change: its own while it runs, mm2's again when it returns.

| state | harm without this |
|---|---|
| working folder | relative paths of the command line name other folders |
| umask | files that nobody may read |
| `sys.stdout`, `sys.stderr` | results and errors that nobody sees |
| handlers of SIGINT, SIGTERM, SIGHUP | a run that cannot be stopped |

A port may change its working folder when it is imported, and open files by relative paths in its forward pass: when it
is called again, it finds the state that it left. mm2's threads run beside a port, so they use absolute paths.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from minimax_tools.machine.stops import STOPS
from neuron.process.record import Status, StatusRecord

_UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)
# Global, as the state itself is: by name, what the port's code left that differs from mm2's.
_left_by_port: dict[str, Any] = {}
_depth = 0


@contextmanager
def port_state() -> Iterator[None]:
    """Give the block, a port's code, the state that earlier blocks left; set back mm2's at its end. Blocks may nest."""
    global _depth
    if _depth or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {name: read() for name, (read, _) in _STATES.items()}
    for name, value in _left_by_port.items():
        _set(name, value)
    _depth = 1
    try:
        yield
    finally:
        _depth = 0
        for name, value in before.items():
            left = _STATES[name][0]()
            if left == value:
                _left_by_port.pop(name, None)
            else:
                _left_by_port[name] = left
                _set(name, value)


def _set(name: str, value: Any) -> None:
    # A folder may be gone, and a handler that was not set by Python cannot be set by it.
    with suppress(OSError, TypeError, ValueError):
        _STATES[name][1](value)


def _folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - a text, as os.chdir takes it
    except OSError:
        return None  # it was removed


def _umask() -> int | None:
    # The system call can only replace it, and files that threads make meanwhile would get the wrong one.
    try:
        match = _UMASK.search(Path("/proc/self/status").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return int(match[1], 8) if match else None


def _handlers() -> tuple[Any, ...]:
    return tuple(map(signal.getsignal, STOPS))


def _set_handlers(handlers: tuple[Any, ...]) -> None:
    for number, handler in zip(STOPS, handlers, strict=True):
        if handler is not None:
            signal.signal(number, handler)


def _set_streams(streams: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = streams


# How each state is read and set.
_STATES: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = MappingProxyType(
    {
        "folder": (_folder, os.chdir),
        "umask": (_umask, os.umask),
        "streams": (lambda: (sys.stdout, sys.stderr), _set_streams),
        "handlers": (_handlers, _set_handlers),
    }
)


# Environment variable with the descriptor of a rank's record, set by the process that starts the ranks.
RECORD_VARIABLE = "MM2_STATUS_DESCRIPTOR"
# Name of the memory file that holds a command's standard output back until the supervisor knows how it ended.
HELD_BACK = "mm2-output"
# Signal that asks for the Python stack. A real-time signal, as ports and libraries use the others.
STACK_SIGNAL = signal.SIGRTMAX - 3
# PR_SET_PDEATHSIG of prctl(2).
_PARENT_DEATH_SIGNAL = 1


class _StatusWriter:
    """Writer of the status of the process that made it; copies in forked children write nothing."""

    def __init__(self, record: StatusRecord) -> None:
        self._record = record
        self._process = os.getpid()
        self.status = Status()

    def write(self, status: Status) -> None:
        self.status = status
        if os.getpid() == self._process:
            self._record.write(status)


# Global, as signal handlers are: a process has one status, and many rooms report their activity.
_writer: _StatusWriter | None = None


@contextmanager
def doing(activity: str, *, is_in_port: bool = True) -> Iterator[None]:
    """Make the block the process's activity, as in "running layer 3 of port port.py:Layer".

    Blocks may nest; the time limit counts from the outermost. `is_in_port`: the port's code runs, not mm2's. What it
    changes of the process (see `port_state`) is mm2's again at the block's end.
    """
    with port_state() if is_in_port else nullcontext(), _reported(activity, is_in_port=is_in_port):
        yield


@contextmanager
def _reported(activity: str, *, is_in_port: bool) -> Iterator[None]:
    writer = _writer
    if writer is None:
        yield
        return
    outer = writer.status
    since_s = time.monotonic() if outer.limited_since_s is None else outer.limited_since_s
    writer.write(replace(outer, activity=activity, is_in_port=is_in_port, limited_since_s=since_s))
    try:
        yield
    finally:
        writer.write(replace(outer, last_activity=activity))


def limit_layers(timeout_s: float) -> None:
    """Set the longest time in seconds of an outermost `doing`, one pass through a layer; 0 for no limit."""
    if _writer is not None:
        _writer.write(replace(_writer.status, limit_s=timeout_s))


def run_supervised(command: Callable[[], object], record: StatusRecord, *, parent: int) -> NoReturn:
    """Run a command as this process's only work, record its exit code, and exit with it.

    The command ends by returning, or by SystemExit. A process that ends earlier leaves no exit code in the record.
    `parent` is the supervisor's process number: this process is killed when the supervisor ends.
    """
    global _writer
    _die_with(parent)
    _writer = _StatusWriter(record)
    if not faulthandler.is_enabled():
        faulthandler.enable(record.descriptor, all_threads=False)
    faulthandler.register(STACK_SIGNAL, record.descriptor, all_threads=False)
    exit_code = 0
    try:
        command()
    except SystemExit as end:
        exit_code = _exit_code(end)
    sys.stdout.flush()
    sys.stderr.flush()
    _writer.write(replace(_writer.status, exit_code=exit_code, num_output_bytes=_output_size()))
    sys.exit(exit_code)


def discard_output() -> None:
    """Drop the standard output of this process and its children so far, if a supervisor holds it back."""
    # The link in /proc names the file behind standard output: this memory file, if the output is held back.
    if HELD_BACK in str(Path("/proc/self/fd/1").readlink()):
        os.ftruncate(1, 0)
        os.lseek(1, 0, os.SEEK_SET)


def _exit_code(end: SystemExit) -> int:
    if end.code is not None and not isinstance(end.code, int):
        # No command of mm2 exits with a text, so a port does: the process ends without an exit code in the record.
        raise end
    return end.code or 0


def _output_size() -> int:
    """Return the size of standard output if it is a file, as when it is held back; else 0."""
    file_status = os.fstat(1)
    return file_status.st_size if stat.S_ISREG(file_status.st_mode) else 0


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        # The parent ended before the call above.
        os.kill(os.getpid(), signal.SIGKILL)

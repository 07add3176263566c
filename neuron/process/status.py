"""Status of this process, told to whoever supervises it; told to nobody where nobody does."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from neuron.process.record import Status, StatusRecord

# The variable that gives a rank the record of mm2, which started it and supervises it.
RECORD_VARIABLE = "MM2_STATUS_DESCRIPTOR"
# The name of the memory file that holds back a command's standard output.
HELD_BACK = "mm2-output"
# Asks for the Python stack. A real-time signal: ports and libraries use the others.
STACK_SIGNAL = signal.SIGRTMAX - 3
# PR_SET_PDEATHSIG of prctl(2).
_PARENT_DEATH_SIGNAL = 1


class _Teller:
    """Tells the status of the process that made it; copies of it in forked children are silent."""

    def __init__(self, record: StatusRecord) -> None:
        self._record = record
        self._process = os.getpid()
        self.status = Status()

    def tell(self, status: Status) -> None:
        self.status = status
        if os.getpid() == self._process:
            self._record.write(status)


# Of the process, as signal handlers are: port code runs too deep to hand it down.
_teller: _Teller | None = None


@contextmanager
def doing(activity: str, *, is_in_port: bool = True) -> Iterator[None]:
    """Tell that the block is what the process does; the time limit counts from the outermost such block.

    Args:
        activity: As in "running layer 3 of target port.py:Layer".
        is_in_port: Whether the block is code of the port's.
    """
    teller = _teller
    if teller is None:
        yield
        return
    before = teller.status
    since_s = time.monotonic() if before.limited_since_s is None else before.limited_since_s
    teller.tell(replace(before, activity=activity, is_in_port=is_in_port, limited_since_s=since_s))
    try:
        yield
    finally:
        teller.tell(replace(before, last_activity=activity))


def limit_layers(timeout_s: float) -> None:
    """Tell the longest time that one pass through a layer may take; 0 for any."""
    if _teller is not None:
        _teller.tell(replace(_teller.status, limit_s=timeout_s))


def run_told(command: Callable[[], object], record: StatusRecord, *, parent: int) -> NoReturn:
    """Run a command as this process's only work, tell its exit code last of all, and exit with it.

    Whatever ends the process before leaves no exit code in the record.

    Args:
        command: Ends by returning, or by SystemExit.
        record: Where the status is told.
        parent: The process that supervises this one, which ends with it.
    """
    global _teller
    _die_with(parent)
    _teller = _Teller(record)
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
    _teller.tell(replace(_teller.status, exit_code=exit_code, num_output_bytes=_output_size()))
    sys.exit(exit_code)


def discard_output() -> None:
    """Drop what this process and its own have written to standard output, where a supervisor holds that back."""
    if HELD_BACK in str(Path("/proc/self/fd/1").readlink()):
        os.ftruncate(1, 0)
        os.lseek(1, 0, os.SEEK_SET)


def _exit_code(end: SystemExit) -> int:
    if end.code is not None and not isinstance(end.code, int):
        # No command of mm2's ends with a text.
        raise end
    return end.code or 0


def _output_size() -> int:
    """Return how much was written to standard output, where that is a file."""
    about = os.fstat(1)
    return about.st_size if stat.S_ISREG(about.st_mode) else 0


def _die_with(parent: int) -> None:
    """End this process when `parent` ends, however it does."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        # It ended before.
        os.kill(os.getpid(), signal.SIGKILL)

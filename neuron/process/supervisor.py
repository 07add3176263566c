"""Supervisor: runs a command in a child, and takes its verdict only from mm2's own word.

The child is forked before torch is imported: the parent stays small, and no code of a port runs in it.
Both stay in one process group, so that a terminal's Ctrl-C, Ctrl-Z and debuggers work as in one process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from neuron.process.record import Status, StatusRecord
from neuron.process.status import HELD_BACK, STACK_SIGNAL, run_told

if TYPE_CHECKING:
    from minimax_tools.errors import CannotRunError

# What is passed on to the child, and ends this process as it ends that one.
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AWAITED = {*_STOPPING, signal.SIGCHLD, signal.SIGCONT}
_POLL_S = 0.25
# A child that told its exit code may still have threads and handlers of a port's to end.
_END_GRACE_S = 30.0
# Time to write a stack, of whatever the process does.
_STACK_S = 2.0
# So many within so long mean that the child does not listen.
_IMPATIENT, _IMPATIENCE_S = 3, 5.0
_JSON, _DEBUG = "--json", "--debug"


def supervise(command: Callable[[], object], arguments: Sequence[str]) -> int:
    """Run a command in a child process and wait for it.

    The child must tell its exit code itself, as the last thing. Where it ends otherwise, or one pass through a layer
    takes longer than its limit, that is an error, which is printed here. With `--json` the child's standard output
    is held back until then: it is whole, or replaced by the error.

    Args:
        command: Runs in the child; ends by returning or by SystemExit.
        arguments: Its command line.

    Returns:
        The exit code. In the child it does not return.
    """
    child = _Child(command, held_back=_JSON in arguments)
    exit_code = child.wait()
    try:
        if exit_code is not None:
            child.hand_on_output()
            return exit_code
        error: BaseException = child.error()
        if _DEBUG in arguments:
            sys.stderr.write(child.record.read_stack())
    except (OSError, KeyboardInterrupt) as met:
        # Nobody reads the output, the disk is full, or the user has enough.
        exit_code, error = None, met
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from minimax_tools.command_line.console import print_error

    return print_error(error, as_json=_JSON in arguments)


class _Child:
    """A forked child that runs a command."""

    def __init__(self, command: Callable[[], object], *, held_back: bool) -> None:
        self.record = StatusRecord.create()
        self._output = os.memfd_create(HELD_BACK) if held_back else None
        self._timeout: Status | None = None
        self._interrupts: list[float] = []
        self._stopped_by: int | None = None
        self._told_s: float | None = None
        # When a stopped process went on: a limit does not count the time before.
        self._resumed_s = 0.0
        self._status = 0
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        parent = os.getpid()
        self._process = os.fork()
        if self._process == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if self._output is not None:
                os.dup2(self._output, 1)
            run_told(command, self.record, parent=parent)
        self._mask = before

    def wait(self) -> int | None:
        """The exit code that mm2 chose in the child; None where the child ended without."""
        while not self._has_ended():
            received = signal.sigtimedwait(_AWAITED, _POLL_S)
            if received is not None and received.si_signo in _STOPPING:
                self._pass_on(received)
            elif received is not None and received.si_signo == signal.SIGCONT:
                self._resumed_s = time.monotonic()
            self._end_overdue()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        return None if self._timeout else self.record.read().exit_code

    def hand_on_output(self) -> None:
        """Write what was held back of the child's output."""
        if self._output is None:
            return
        remaining, offset = self.record.read().num_output_bytes, 0
        while remaining > 0:
            part = os.pread(self._output, min(remaining, 1 << 20), offset)
            sys.stdout.buffer.write(part)
            offset, remaining = offset + len(part), remaining - len(part)
        sys.stdout.buffer.flush()

    def error(self) -> CannotRunError:
        """The error that its end was; does not return where a signal ended both processes."""
        from minimax_tools.errors import CannotRunError
        from neuron.process.ending import end_error, timeout_error

        stack = self.record.read_stack()
        if self._timeout is not None:
            return timeout_error(self._timeout, stack)
        exit_code = os.waitstatus_to_exitcode(self._status)
        if self._stopped_by is None:
            return end_error(exit_code, self.record.read(), stack)
        if -exit_code == self._stopped_by != signal.SIGINT:
            # As if there were one process.
            signal.signal(self._stopped_by, signal.SIG_DFL)
            signal.raise_signal(self._stopped_by)
        return CannotRunError("interrupted")

    def _has_ended(self) -> bool:
        ended, status = os.waitpid(self._process, os.WNOHANG)
        if ended:
            self._status = status
        return bool(ended)

    def _pass_on(self, received: signal.struct_siginfo) -> None:
        self._stopped_by = received.si_signo
        # A terminal's reach both processes.
        if received.si_code <= 0:
            os.kill(self._process, received.si_signo)
        now_s = time.monotonic()
        self._interrupts = [at_s for at_s in self._interrupts if now_s - at_s < _IMPATIENCE_S] + [now_s]
        if len(self._interrupts) >= _IMPATIENT:
            self._kill()

    def _end_overdue(self) -> None:
        """End the child where it passed its limit, or does not end after it told its exit code."""
        status, now_s = self.record.read(), time.monotonic()
        if status.exit_code is not None:
            self._told_s = self._told_s or now_s
            if now_s - self._told_s > _END_GRACE_S:
                self._kill()
        elif self._timeout is None and status.overdue(now_s, resumed_s=self._resumed_s):
            self._timeout = status
            self._ask_for_stack()
            self._kill()

    def _ask_for_stack(self) -> None:
        os.kill(self._process, STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_S
        while not self.record.read_stack() and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        # The whole of it.
        time.sleep(_POLL_S)

    def _kill(self) -> None:
        """End the child and all that it started."""
        import psutil

        child = psutil.Process(self._process)
        for process in [*child.children(recursive=True), child]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

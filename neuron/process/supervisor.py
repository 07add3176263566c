"""Supervisor: runs a command in a child process, and accepts only an exit code that mm2 itself chose.

The child is forked before torch is imported, so the parent stays small, and no code of a port runs in it.
Both are in one process group, so that Ctrl-C, Ctrl-Z and debuggers work as with one process.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from minimax_tools.errors import CannotRunError, TargetError
from minimax_tools.machine.stops import STOPS, asks_for_json, die_when_stopped, stopped_error
from minimax_tools.machine.streams import OutputError, drop_output
from neuron.process.record import Status, StatusRecord
from neuron.process.status import HELD_BACK, STACK_SIGNAL, run_supervised

_MEANINGS: dict[int, str] = {
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGBUS: "a bus error: memory or a mapped file is missing",
    signal.SIGABRT: "an abort: a library gave up",
    signal.SIGFPE: "an arithmetic error",
    signal.SIGILL: "an instruction that this processor lacks",
    signal.SIGKILL: "often by the kernel, where memory ran out",
}


# A frame as faulthandler prints it.
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_NUM_FRAMES_SHOWN = 3

_RESUME = "Finished layers are kept: the same command continues after them."
_EXIT_STEP = f"Only mm2 may end the process: look there for os._exit and exit(). {_RESUME}"
_SIGNAL_STEP = f"Look there for calls into native code. {_RESUME}"
_MEMORY_STEP = f"If memory ran out, run fewer or shorter prompts, or use --no-prefetch. {_RESUME}"
_TIMEOUT_STEP = f"Allow more with --layer-timeout SECONDS; 0 sets no limit. {_RESUME}"


def describe_end(exit_code: int, status: Status) -> str:
    """Return the end of a process and its last activity: "it was ended by SIGSEGV (…) while running layer 3 of …".

    `exit_code` is the negative signal number if a signal ended the process; `status` is the process's last.
    """
    if exit_code >= 0:
        return f"it ended with exit code {exit_code}, without a verdict, {_describe_moment(status)}"
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    meaning = f" ({_MEANINGS[number]})" if number in _MEANINGS else ""
    return f"it was ended by {name}{meaning} {_describe_moment(status)}"


def describe_timeout(status: Status) -> str:
    """Return the activity that took too long: "running layer 3 of … took more than 60 s"."""
    return f"{status.activity} took more than {status.limit_s:g} s"


def end_error(exit_code: int, status: Status, stack: str) -> CannotRunError:
    """Return the error for a process that ended without an exit code of mm2.

    The arguments are those of `describe_end`, and the process's Python stack, empty if faulthandler wrote none.
    """
    error_class = TargetError if status.activity else CannotRunError
    next_step = _EXIT_STEP if exit_code >= 0 else _SIGNAL_STEP
    if exit_code == -signal.SIGKILL:
        next_step = _MEMORY_STEP
    text = describe_end(exit_code, status).removeprefix("it ")
    return error_class(f"the process {text}{_word_frames(stack)}", next_step=next_step)


def timeout_error(status: Status, stack: str) -> TargetError:
    """Return the error for a process that was ended because a layer took too long."""
    return TargetError(f"{describe_timeout(status)}{_word_frames(stack)}", next_step=_TIMEOUT_STEP)


def _describe_moment(status: Status) -> str:
    if status.activity:
        return f"while {status.activity}"
    if status.last_activity:
        return f"after {status.last_activity}"
    return "before it reached the port"


def _word_frames(stack: str) -> str:
    """Return the innermost frames of a stack: ", in forward (port.py:9), called by …"; empty without a stack."""
    frames = [f"{name} ({path}:{line})" for path, line, name in _FRAME.findall(stack)[:_NUM_FRAMES_SHOWN]]
    return f", in {', called by '.join(frames)}" if frames else ""


_AWAITED = {*STOPS, signal.SIGCHLD, signal.SIGCONT}
# Longest time between two looks at the time limit. An awaited signal is handled at once.
_POLL_S = 0.25
# Longest time from a child's exit code to its end: a port's threads and exit handlers may still have to finish.
_EXIT_GRACE_S = 30.0
# Longest time to wait for the stack of a busy process.
_STACK_S = 2.0
# Three stopping signals within five seconds kill a child that does not react.
_NUM_INTERRUPTS, _INTERRUPTS_S = 3, 5.0
_DEBUG = "--debug"


class PrintError(Protocol):
    """A function that prints an error and returns its exit code."""

    def __call__(self, error: BaseException, *, as_json: bool) -> int:
        """Print the error."""


def supervise(command: Callable[[], object], arguments: Sequence[str], *, print_error: PrintError) -> int:
    """Run a command in a child process and wait for it.

    The child must write its exit code to a record in shared memory. If it ends without an exit code, or one pass
    through a layer takes longer than the limit, an error is printed here. With `--json` the child's standard output is
    held back until its end: it is printed whole, or replaced by the error.

    Args:
        command: Runs in the child; ends by returning or by SystemExit.
        arguments: The command line, with the command's name.
        print_error: Prints an error, on stdout too if `as_json`, and returns its exit code.

    Returns:
        The exit code. The child never returns.
    """
    as_json = asks_for_json(arguments)
    child = _Child(command, held_back=as_json)
    try:
        exit_code = child.wait()
        if exit_code is not None:
            child.print_output()
            return exit_code
        error = child.error(arguments)
        if _DEBUG in arguments:
            sys.stderr.write(child.record.read_stack())
    except BrokenPipeError:
        # The reader of the output has gone, as after `| head`.
        drop_output()
        return CannotRunError.exit_code
    except OSError as output_error:
        drop_output()
        error, as_json = OutputError.of(output_error), False
    return print_error(error, as_json=as_json)


class _Child:
    """A child that runs a command: forked by the constructor, then `wait`ed for, and then asked for its end."""

    def __init__(self, command: Callable[[], object], *, held_back: bool) -> None:
        self.record = StatusRecord.create()
        self._output = os.memfd_create(HELD_BACK) if held_back else None
        # Seen while waiting, times by the monotonic clock:
        self._resumed_s = 0.0  # when the processes continued after Ctrl-Z: earlier time does not count
        self._interrupts: list[float] = []  # when stopping signals came lately
        self._is_stopped = False  # whether a stopping signal came
        self._overdue_status: Status | None = None  # the status in which the child passed its time limit
        self._exit_code_s: float | None = None  # when the child had written its exit code
        self._wait_status = 0  # the child's end, as waitpid reports it
        # An inherited setting could let the kernel discard the child's exit status.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        # Blocked, so that `wait` receives these signals one by one.
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        parent = os.getpid()
        self._process = os.fork()
        if self._process == 0:
            die_when_stopped()  # until the command handles stops: the parent tells of them
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
            if self._output is not None:
                os.dup2(self._output, 1)
            # Does not return: the child ends in it.
            run_supervised(command, self.record, parent=parent)

    def wait(self) -> int | None:
        """Return the exit code that mm2 chose in the child; None if the child ended without one."""
        while not self._has_ended():
            received = signal.sigtimedwait(_AWAITED, _POLL_S)
            if received is not None and received.si_signo in STOPS:
                self._pass_on(received)
            elif received is not None and received.si_signo == signal.SIGCONT:
                self._resumed_s = time.monotonic()
            self._kill_if_late()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        return None if self._overdue_status else self.record.read().exit_code

    def print_output(self) -> None:
        """Print the child's output that was held back."""
        if self._output is None:
            return
        remaining, offset = self.record.read().num_output_bytes, 0
        while remaining > 0:
            part = os.pread(self._output, min(remaining, 1 << 20), offset)
            sys.stdout.buffer.write(part)
            offset, remaining = offset + len(part), remaining - len(part)
        sys.stdout.buffer.flush()

    def error(self, arguments: Sequence[str]) -> CannotRunError:
        """Return the error for the child's end; `arguments` is its command line."""
        stack = self.record.read_stack()
        if self._overdue_status is not None:
            return timeout_error(self._overdue_status, stack)
        if self._is_stopped:
            return stopped_error(arguments, resumes=True)
        return end_error(os.waitstatus_to_exitcode(self._wait_status), self.record.read(), stack)

    def _has_ended(self) -> bool:
        # 0 while the child runs, then its own number.
        ended_process, wait_status = os.waitpid(self._process, os.WNOHANG)
        if ended_process != 0:
            self._wait_status = wait_status
        return ended_process != 0

    def _pass_on(self, received: signal.struct_siginfo) -> None:
        """Pass a stopping signal on to the child; kill the child if it did not react to the last ones."""
        self._is_stopped = True
        # A code above 0 is the kernel's: a terminal has sent the signal to both processes.
        if received.si_code <= 0:
            os.kill(self._process, received.si_signo)
        now_s = time.monotonic()
        self._interrupts = [at_s for at_s in self._interrupts if now_s - at_s < _INTERRUPTS_S] + [now_s]
        if len(self._interrupts) >= _NUM_INTERRUPTS:
            self._kill()

    def _kill_if_late(self) -> None:
        """Kill the child if it passed its time limit, or does not end after it wrote its exit code."""
        status, now_s = self.record.read(), time.monotonic()
        if status.exit_code is not None:
            if self._exit_code_s is None:
                self._exit_code_s = now_s
            if now_s - self._exit_code_s > _EXIT_GRACE_S:
                self._kill()
        elif self._overdue_status is None and status.is_overdue(now_s, resumed_s=self._resumed_s):
            self._overdue_status = status
            self._ask_for_stack()
            self._kill()

    def _ask_for_stack(self) -> None:
        os.kill(self._process, STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_S
        while not self.record.read_stack() and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        # The stack has begun: leave time for the rest of it.
        time.sleep(_POLL_S)

    def _kill(self) -> None:
        import psutil

        child = psutil.Process(self._process)
        for process in [*child.children(recursive=True), child]:
            # A process may end by itself meanwhile.
            with suppress(psutil.NoSuchProcess):
                process.kill()

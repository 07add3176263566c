"""Ending: how a process that runs a port ended without word from mm2, in words and as an error."""

from __future__ import annotations

import re
import signal

from minimax_tools.errors import CannotRunError, TargetError
from neuron.process.record import Status

_MEANINGS = {
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGBUS: "a bus error: memory or a mapped file that is not there",
    signal.SIGABRT: "an abort: a library gave up",
    signal.SIGFPE: "an arithmetic error",
    signal.SIGILL: "an instruction that this processor lacks",
    signal.SIGKILL: "often by the kernel, where memory ran out",
}
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_NUM_FRAMES_SHOWN = 3

_RESUME = "What was finished is kept: the same command goes on behind it."
_EXIT_STEP = f"Nothing but mm2 may end the process: look there for os._exit and exit(). {_RESUME}"
_SIGNAL_STEP = f"Look there for calls into native code. {_RESUME}"
_MEMORY_STEP = (
    f"If memory ran out, ask for less at a time: fewer or shorter prompts, --no-prefetch. {_RESUME}"
)
_TIMEOUT_STEP = f"Allow more with --layer-timeout SECONDS; 0 sets no limit. {_RESUME}"


def describe_end(exit_code: int, status: Status) -> str:
    """Return how a process ended, and what it did last: "it was ended by SIGSEGV (…) while running layer 3 of …".

    Args:
        exit_code: Its exit code; of one that a signal ended, the signal's number below zero.
        status: What it told last.
    """
    if exit_code < 0:
        number = -exit_code
        meaning = _MEANINGS.get(signal.Signals(number)) if number in set(signal.Signals) else None
        end = f"it was ended by {_signal_name(number)}{f' ({meaning})' if meaning else ''}"
    else:
        end = f"it ended with exit code {exit_code}, without a verdict,"
    return f"{end} {_occasion(status)}"


def describe_timeout(status: Status) -> str:
    """Return what took too long: "running layer 3 of … took more than 60 s"."""
    return f"{status.activity} took more than {status.limit_s:g} s"


def end_error(exit_code: int, status: Status, stack: str) -> CannotRunError:
    """The error that a process ended before mm2 did.

    Args:
        exit_code: As for `describe_end`.
        status: What it told last.
        stack: Its Python stack, where faulthandler wrote one.
    """
    kind = TargetError if status.activity else CannotRunError
    step = _EXIT_STEP if exit_code >= 0 else _MEMORY_STEP if -exit_code == signal.SIGKILL else _SIGNAL_STEP
    text = describe_end(exit_code, status).removeprefix("it ")
    return kind(f"the process {text}{_frames(stack)}", next_step=step)


def timeout_error(status: Status, stack: str) -> TargetError:
    """The error that a layer took too long, and its process was ended."""
    return TargetError(f"{describe_timeout(status)}{_frames(stack)}", next_step=_TIMEOUT_STEP)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _occasion(status: Status) -> str:
    if status.activity:
        return f"while {status.activity}"
    if status.last_activity:
        return f"after {status.last_activity}"
    return "before it came to the port"


def _frames(stack: str) -> str:
    """The innermost frames of a stack: " in forward (port.py:9), called by …"; empty without one."""
    found = [f"{name} ({path}:{line})" for path, line, name in _FRAME.findall(stack)[:_NUM_FRAMES_SHOWN]]
    return f", in {', called by '.join(found)}" if found else ""

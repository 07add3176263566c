"""Ending: the end of a process that ran a port and left no exit code of mm2, as text and as an error."""

from __future__ import annotations

import re
import signal

from minimax_tools.errors import CannotRunError, TargetError
from neuron.process.record import Status

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

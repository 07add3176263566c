"""State of the process that a port's code may change: its own while it runs, mm2's again when it returns.

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

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minimax_tools.command_line.stops import STOPS

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

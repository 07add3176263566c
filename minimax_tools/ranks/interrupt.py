"""An exception in the main thread, caused by another thread or another process."""

from __future__ import annotations

import signal
import threading
from typing import Any


class InterruptedRunError(BaseException):
    """The order to stop, from this rank's watch or from torchrun, which ends all ranks when one has died.

    It is a BaseException, so that no `except Exception` in other code swallows it.
    """


class Interrupter:
    """A `with` block in which the first SIGTERM raises `InterruptedRunError` in the main thread, unless disarmed.

    SIGTERM comes from `interrupt`, or from torchrun. Later ones are ignored until the block ends.
    """

    def __init__(self) -> None:
        self._is_armed = True
        self._lock = threading.Lock()
        self._handler_before: Any = None

    def __enter__(self) -> Interrupter:
        self._handler_before = signal.signal(signal.SIGTERM, self._raise_once)
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()
        signal.signal(signal.SIGTERM, self._handler_before)

    def disarm(self) -> None:
        """Ignore SIGTERM from here on."""
        with self._lock:
            self._is_armed = False

    def interrupt(self) -> None:
        """Interrupt the main thread from another thread, even in a system call or a wait for a lock."""
        # The lock keeps `disarm` from returning while a signal is on its way.
        with self._lock:
            if self._is_armed:
                # A running thread has an id; `or 0` is for the type checker.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _raise_once(self, *_: object) -> None:
        if self._is_armed:
            self._is_armed = False
            raise InterruptedRunError

"""An exception in the main thread, caused by another thread or another process."""

from __future__ import annotations

import signal
import threading
from typing import Any


class InterruptedRunError(BaseException):
    """The order to stop, from this rank's watch or from torchrun.

    torchrun ends the remaining ranks when one has died. A BaseException: no code may take it for an error of its own.
    """


class Interrupter:
    """A block in which the first SIGTERM raises `InterruptedRunError` in the main thread, until it is disarmed."""

    def __init__(self) -> None:
        self._is_armed = True
        self._lock = threading.Lock()
        self._before: Any = None

    def __enter__(self) -> Interrupter:
        self._before = signal.signal(signal.SIGTERM, self._raise_once)
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()
        signal.signal(signal.SIGTERM, self._before)

    def disarm(self) -> None:
        """Ignore SIGTERM from here on."""
        with self._lock:
            self._is_armed = False

    def interrupt(self) -> None:
        """Interrupt the main thread from another one, also in a system call or a wait for a lock."""
        with self._lock:
            if self._is_armed:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _raise_once(self, *_: object) -> None:
        if self._is_armed:
            self._is_armed = False
            raise InterruptedRunError

"""Stopper: ends what the main thread does, from another thread or another process, by an exception."""

from __future__ import annotations

import signal
import threading
from typing import Any


class InterruptedRunError(BaseException):
    """This rank was told to stop, by its watch or by torchrun, which ends the ranks that are left when one has died.

    Nothing that runs then may take it for its own error.
    """


class Stopper:
    """Turns the first SIGTERM in its block into a `InterruptedRunError` in the main thread, until it is disarmed."""

    def __init__(self) -> None:
        self._is_armed = True
        self._lock = threading.Lock()
        self._before: Any = None

    def __enter__(self) -> Stopper:
        self._before = signal.signal(signal.SIGTERM, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()
        signal.signal(signal.SIGTERM, self._before)

    def disarm(self) -> None:
        """Let nothing be interrupted any more."""
        with self._lock:
            self._is_armed = False

    def interrupt(self) -> None:
        """Interrupt the main thread, from another one; system calls and waits for locks end for it."""
        with self._lock:
            if self._is_armed:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _stop(self, *_: object) -> None:
        if self._is_armed:
            self._is_armed = False
            raise InterruptedRunError

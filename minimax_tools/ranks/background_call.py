"""BackgroundCall: a call in a thread of its own, so that the caller may stop waiting for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class BackgroundCall:
    """A call that runs in its own thread from now on. If it never returns, its thread ends with the process.

    Attributes:
        result: The call's return value; None while it runs.
        error: The exception that ended it; None while it runs, and after success.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.result: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="background call", daemon=True)
        self._thread.start()

    def is_over(self, patience_s: float) -> bool:
        """Wait for the call, at most `patience_s` seconds, and return True if it has ended."""
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error

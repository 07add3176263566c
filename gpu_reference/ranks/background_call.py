"""Errand: a call that goes on in a thread of its own, so that whoever waits for it may stop waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Errand:
    """A call that was begun; its thread ends with the process where the call does not end.

    Attributes:
        result: What it gave; None while it goes on.
        error: What it ended by; None while it goes on, and where it ended well.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.result: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="errand", daemon=True)
        self._thread.start()

    def is_over(self, patience_s: float) -> bool:
        """Whether it ended, in well or in `error`; waits so long for it."""
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error

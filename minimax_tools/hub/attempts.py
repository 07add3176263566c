"""Attempts: tries again what may pass by itself, ever later, and gives up after so many failures in a row."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.faults import asked_delay_s, is_transient

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_LONGEST_DELAY_S = 30.0
# The hub counts requests in windows of five minutes; who asks for more than that is not waited for.
_LONGEST_ASKED_DELAY_S = 330.0


class FetchStoppedError(Exception):
    """Another file's failure, or the user, ended this one's transfer."""


class Attempts:
    """The failures in a row of one piece of work.

    Args:
        access: How many, and how long to wait.
        what: The work in words, for the log.
        stop: Set when nobody wants the work any more.
    """

    def __init__(self, access: HubAccess, *, what: str, stop: threading.Event) -> None:
        self._access = access
        self._what = what
        self._stop = stop
        self._num_failed = 0

    def run(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, which is called until it succeeds.

        Raises:
            FetchStoppedError: `stop` was set.
            Exception: The last failure of `work`.
        """
        while True:
            try:
                return work()
            except Exception as error:
                self.fail(error)

    def progress(self) -> None:
        """Forget earlier failures: data has arrived."""
        self._num_failed = 0

    def fail(self, error: Exception) -> None:
        """Wait after a failure, or raise it, if it is the last one or none that passes.

        Raises:
            FetchStoppedError: `stop` was set.
            Exception: `error`.
        """
        self._num_failed += 1
        asked_s = asked_delay_s(error)
        if (
            not is_transient(error)
            or self._num_failed >= self._access.num_attempts
            or asked_s > _LONGEST_ASKED_DELAY_S
        ):
            raise error
        delay_s = max(
            asked_s, min(_LONGEST_DELAY_S, self._access.first_delay_s * 2 ** (self._num_failed - 1))
        )
        logger.warning(
            "%s: %s: %s. Attempt %d of %d in %.3g s.",
            self._what,
            type(error).__name__,
            " ".join(str(error).split())[:200].rstrip("."),
            self._num_failed + 1,
            self._access.num_attempts,
            delay_s,
        )
        if self._stop.wait(delay_s):
            raise FetchStoppedError

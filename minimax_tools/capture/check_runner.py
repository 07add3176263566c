"""CheckRunner: runs each check of a capture's tensors once, now or on a thread beside the code that reads them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager


class CheckRunner:
    """Checks that have passed, and those that wait on the thread; a check raises CaptureError if it fails.

    The key says what is checked, such as a file and a tensor in it. A key that has passed is not checked again.
    """

    def __init__(self) -> None:
        self._passed: set[Hashable] = set()
        self._pending: dict[Hashable, Future[None]] = {}
        self._thread: ThreadPoolExecutor | None = None  # only within `beside`

    def run(self, key: Hashable, check: Callable[[], None]) -> None:
        """Run a check that has not passed before: on the thread within `beside`, else now."""
        if self._thread is None:
            self.run_now(key, check)
        elif key not in self._passed and key not in self._pending:
            self._pending[key] = self._thread.submit(check)

    def run_now(self, key: Hashable, check: Callable[[], None]) -> None:
        """Run a check that has not passed before."""
        if key not in self._passed:
            check()
            self._passed.add(key)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run checks on a thread while a block runs; the block ends when all of them have run.

        Raises:
            CaptureError: A check failed, even if the block itself raised.
        """
        if self._thread is not None:
            # The outer block waits for the checks of this one.
            yield
            return
        with ThreadPoolExecutor(1) as self._thread:
            try:
                yield
            finally:
                # Checks asked for from here on run at once; those that wait are waited for, in order.
                self._thread = None
                pending, self._pending = self._pending, {}
                for key, check in pending.items():
                    check.result()
                    self._passed.add(key)

"""ReadingPool: threads that read and dequantise on all cores, one tensor in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from types import TracebackType

from minimax_tools.machine.core_pool import CorePool

Jobs = list[Future[None]]


class ReadingPool:
    """Runs many small fillings of memory at once; they must not depend on each other.

    Args:
        num_threads: How many threads read.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = CorePool("reading", num_threads)

    def start(self, fillings: Iterable[Callable[[], None]]) -> Jobs:
        """Begin, and return at once."""
        return [self._threads.submit(filling) for filling in fillings]

    def finish(self, jobs: Sequence[Future[None]]) -> None:
        """Wait until all are done, and raise the first error among them, in their order."""
        for job in jobs:
            job.result()

    def abandon(self, jobs: Sequence[Future[None]]) -> None:
        """Start no more of them, and wait for those that run: afterwards none touches memory any more."""
        for job in jobs:
            job.cancel()
        wait(jobs)

    def close(self) -> None:
        """Drop what has not begun, wait for what runs, and end the threads."""
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> ReadingPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

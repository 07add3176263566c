"""A pool of threads, one for each core. Within each of them torch computes with that one thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CorePool(ThreadPoolExecutor):
    """Threads for many independent pieces of work, one piece on each core.

    Args:
        name: Name of the threads.
        num_threads: Number of threads; None for the number of threads that torch is set to.
    """

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        self._num_torch_threads = torch.get_num_threads()
        self._num_threads = num_threads or self._num_torch_threads
        super().__init__(
            self._num_threads,
            thread_name_prefix=f"mm2-{name}",
            # torch keeps its own number for each thread: each thread of the pool computes alone.
            initializer=lambda: torch.set_num_threads(1),
        )

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Call a function on each core; see `concurrent.futures`.

        On one core the caller would only wait for the thread. It computes each result itself, when it is taken.
        """
        if self._num_threads == self._num_torch_threads == 1 and timeout is None:
            return map(fn, *iterables)
        return super().map(fn, *iterables, timeout=timeout, chunksize=chunksize)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads; see `concurrent.futures`."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        # The number set last also holds for threads that begin later, so the pool's 1 must not stay.
        torch.set_num_threads(self._num_torch_threads)

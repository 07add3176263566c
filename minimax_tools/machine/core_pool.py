"""A pool of threads, one for each core, in each of which torch computes with one thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


class CorePool(ThreadPoolExecutor):
    """Threads for many independent pieces of work, one piece on each core.

    Args:
        name: Name of the threads.
        num_threads: Number of threads; None for as many as torch computes with here.
    """

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        self._num_computing = torch.get_num_threads()
        super().__init__(
            num_threads or self._num_computing, thread_name_prefix=f"mm2-{name}", initializer=_compute_alone
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads; see `concurrent.futures`."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        # torch takes the last number that was set for all threads that begin later.
        torch.set_num_threads(self._num_computing)


def _compute_alone() -> None:
    """Keep torch to one thread; the pool has one for each core."""
    torch.set_num_threads(1)

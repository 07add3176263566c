"""CorePool: threads, as many as torch computes with, in each of which torch computes alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


class CorePool(ThreadPoolExecutor):
    """Work that comes in many independent pieces, one piece on each core.

    Args:
        name: What its threads are called.
        num_threads: How many; None for as many as torch computes with here.
    """

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        self._num_computing = torch.get_num_threads()
        super().__init__(
            num_threads or self._num_computing, thread_name_prefix=f"mm2-{name}", initializer=_compute_alone
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads; see `concurrent.futures`."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        # What one thread sets, torch takes for every thread that begins later.
        torch.set_num_threads(self._num_computing)


def _compute_alone() -> None:
    """Keep torch to one thread: the pool already has one for each core."""
    torch.set_num_threads(1)

"""Threads, one for each core: a pool of them, and work shared out among them.

Within each of them torch computes with that one thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

R = TypeVar("R")


class CorePool(ThreadPoolExecutor):
    """Threads for many independent pieces of work, one piece on each core.

    Args:
        name: Name of the threads.
        num_threads: Number of threads; None for the number of threads that torch is set to.
    """

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        self._num_torch_threads = torch.get_num_threads()
        super().__init__(
            num_threads or self._num_torch_threads,
            thread_name_prefix=f"mm2-{name}",
            # torch keeps its own number for each thread: each thread of the pool computes alone.
            initializer=lambda: torch.set_num_threads(1),
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads; see `concurrent.futures`."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        # The number set last also holds for threads that begin later, so the pool's 1 must not stay.
        torch.set_num_threads(self._num_torch_threads)


def on_cores(name: str, work: Callable[[range], R], num_items: int, *, fewest: int) -> list[R]:
    """Call `work` with one part of the items on each core, and return what it gives, in the items' order.

    Args:
        name: Name of the threads.
        work: Takes the numbers of the items of its part, one after the other.
        num_items: Number of all items.
        fewest: With fewer items, this thread does all of the work.
    """
    num_parts = torch.get_num_threads() if num_items >= fewest else 1
    # Items of a part, rounded up.
    share = max(-(-num_items // num_parts), 1)
    parts = [range(start, min(start + share, num_items)) for start in range(0, max(num_items, 1), share)]
    if len(parts) == 1:
        return [work(parts[0])]
    with CorePool(name) as pool:
        return list(pool.map(work, parts))

from __future__ import annotations

import threading

import torch

from minimax_tools.machine.core_pool import CorePool


def test_torch_computes_alone_in_each_thread_and_as_before_elsewhere() -> None:
    before = torch.get_num_threads()
    with CorePool("test", 2) as pool:
        inside = list(pool.map(lambda _: torch.get_num_threads(), range(4)))
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert inside == [1, 1, 1, 1]
    assert torch.get_num_threads() == before
    assert later == [before]


def test_pool_has_as_many_threads_as_torch_unless_told() -> None:
    with CorePool("test") as pool:
        barrier = threading.Barrier(torch.get_num_threads())
        list(pool.map(lambda _: barrier.wait(60), range(torch.get_num_threads())))

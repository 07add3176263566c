"""The reading threads: all of them at once, errors kept, nothing left running."""

from __future__ import annotations

import threading

import pytest
import torch

from minimax_tools.checkpoint.reading_pool import ReadingPool


def test_as_many_run_at_once_as_there_are_threads() -> None:
    # Each waits for the two others: fewer threads would never end.
    together = threading.Barrier(3, timeout=60)
    with ReadingPool(3) as pool:
        pool.finish(pool.start([lambda: void(together.wait())] * 3))


def void(_: object) -> None:
    pass


def test_first_error_in_the_order_of_the_jobs_is_raised() -> None:
    def fail(text: str) -> None:
        raise ValueError(text)

    with ReadingPool(2) as pool:
        jobs = pool.start([lambda: None, lambda: fail("second"), lambda: fail("third")])
        with pytest.raises(ValueError, match="second"):
            pool.finish(jobs)


def test_abandoned_jobs_do_not_begin_and_those_begun_have_ended() -> None:
    begun, may_end = threading.Event(), threading.Event()
    ended = []

    def hold() -> None:
        begun.set()
        may_end.wait(60)
        ended.append("first")

    with ReadingPool(1) as pool:
        jobs = pool.start([hold, lambda: ended.append("second")])
        begun.wait(60)
        threading.Timer(0.05, may_end.set).start()
        pool.abandon(jobs)
        assert ended == ["first"]


def test_each_thread_computes_alone_and_the_caller_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found: list[int] = []
        with ReadingPool(1) as pool:
            pool.finish(pool.start([lambda: found.append(torch.get_num_threads())]))
        assert (found, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)

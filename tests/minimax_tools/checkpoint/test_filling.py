"""The reading threads: all of them at once, errors kept, nothing left running."""

from __future__ import annotations

import threading

import pytest
import torch

from minimax_tools.checkpoint.filling import Gathered, ReadingPool


def test_as_many_run_at_once_as_there_are_threads() -> None:
    # Each waits for the two others: fewer threads would never end.
    together = threading.Barrier(3, timeout=60)
    with ReadingPool(3) as pool:
        pool.start([lambda: void(together.wait())] * 3).finish()


def void(_: object) -> None:
    pass


def test_first_error_in_the_order_of_the_jobs_is_raised() -> None:
    def fail(text: str) -> None:
        raise ValueError(text)

    with ReadingPool(2) as pool:
        filling = pool.start([lambda: None, lambda: fail("second"), lambda: fail("third")])
        with pytest.raises(ValueError, match="second"):
            filling.finish()


class Held:
    """A job that holds its thread until a moment after `release_soon`, and the names of the jobs that have ended."""

    def __init__(self, name: str) -> None:
        self.ended: list[str] = []
        self._name = name
        self._begun, self._may_end = threading.Event(), threading.Event()

    def run(self) -> None:
        self._begun.set()
        self._may_end.wait(60)
        self.ended.append(self._name)

    def release_soon(self) -> None:
        """Wait until the job has begun; it may end a moment later."""
        self._begun.wait(60)
        threading.Timer(0.05, self._may_end.set).start()


def test_abandoned_jobs_do_not_begin_and_those_begun_have_ended() -> None:
    held = Held("first")
    with ReadingPool(1) as pool:
        filling = pool.start([held.run, lambda: held.ended.append("second")])
        held.release_soon()
        filling.abandon()
        assert held.ended == ["first"]


def test_each_thread_computes_alone_and_the_caller_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found: list[int] = []
        with ReadingPool(1) as pool:
            pool.start([lambda: found.append(torch.get_num_threads())]).finish()
        assert (found, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_failed_filling_writes_nothing_afterwards() -> None:
    storage = torch.zeros(64)

    def read(name: str, place: torch.Tensor) -> None:
        if name == "3":
            raise ValueError("no such tensor")
        place.fill_(1)

    with ReadingPool(1) as pool:
        filling = pool.fill({str(index): storage[index] for index in range(64)}, read)
        with pytest.raises(ValueError, match="no such tensor"):
            filling.finish()
        written = storage.clone()
        pool.start([lambda: None]).finish()
    assert torch.equal(storage, written)
    assert storage[:3].all()
    assert not storage.all()


def test_error_is_raised_after_the_other_jobs_ended() -> None:
    held = Held("second")

    def fail() -> None:
        held.release_soon()
        raise ValueError("first")

    with ReadingPool(2) as pool:
        filling = pool.start([fail, held.run])
        with pytest.raises(ValueError, match="first"):
            filling.finish()
        assert held.ended == ["second"]


def test_closing_waits_for_what_has_begun_and_drops_the_rest() -> None:
    held = Held("first")
    with ReadingPool(1) as pool:
        pool.start([held.run, lambda: held.ended.append("second")])
        held.release_soon()
    assert held.ended == ["first"]


def test_a_weight_is_gathered_from_its_tensors() -> None:
    def read(name: str, place: torch.Tensor) -> None:
        place.fill_(float(name))

    storage = torch.zeros(2, 3)
    halves = Gathered(shape=(2, 3), read=read, places=lambda whole: {"1": whole[0], "2": whole[1]})
    halves.fill(storage)
    assert storage.tolist() == [[1.0] * 3, [2.0] * 3]
    Gathered.whole("7", (2, 3), read).fill(storage)
    assert storage.tolist() == [[7.0] * 3] * 2

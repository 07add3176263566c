from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from minimax_tools.errors import CannotRunError
from minimax_tools.machine.memory import MemoryBudget, MemoryBudgetError, MemoryUsage

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the kinds of memory apart"),
    pytest.mark.usefixtures("freed_before"),
]

MB = 10**6
BLOCK = 64 * MB
# What Python, the allocator and other threads may take meanwhile.
SLACK = 12 * MB


def test_need_above_the_budget_stops_before_it_is_taken() -> None:
    before = MemoryUsage.current().anonymous_bytes
    budget = MemoryBudget(before + BLOCK)
    budget.require(BLOCK // 2, "reading layer 6")
    with pytest.raises(MemoryBudgetError):
        budget.require(2 * BLOCK, "reading layer 7")
    assert MemoryUsage.current().anonymous_bytes - before < SLACK


def test_error_names_purpose_need_use_limit_and_way_out() -> None:
    budget = MemoryBudget(10 * MB)
    with pytest.raises(MemoryBudgetError) as caught:
        budget.require(500 * MB, "reading layer 7")
    error = caught.value
    assert isinstance(error, CannotRunError)
    assert (error.exit_code, error.purpose, error.needed_bytes) == (3, "reading layer 7", 500 * MB)
    assert (error.limit_bytes, error.promised_bytes) == (10 * MB, 0)
    assert abs(error.in_use_bytes - MemoryUsage.current().anonymous_bytes) < SLACK
    assert str(error).startswith(
        "reading layer 7 would break the memory budget: expected at most 10.0 MB, found "
    )
    assert " in use and 500.0 MB more needed: " in str(error)
    assert "or ask for less at a time: no prefetch, fewer or shorter prompts." in str(error)


def test_budget_that_the_error_names_is_enough() -> None:
    error = MemoryBudgetError(
        "reading",
        needed_bytes=1_030_000_000,
        in_use_bytes=200_000_000,
        promised_bytes=4_000_000,
        limit_bytes=10**9,
    )
    assert "found 200.0 MB in use, 4.0 MB reserved and not filled yet and 1.0 GB more needed" in str(error)
    # 1.234 GB in all: 1.2 would stop again.
    assert "234.0 MB too much. Allow 1.3GB or more" in str(error)


def test_what_the_process_holds_already_counts(fill: Callable[[int], torch.Tensor]) -> None:
    tensor = fill(BLOCK)
    with pytest.raises(MemoryBudgetError):
        MemoryBudget(tensor.nbytes).require(1, "anything")


def test_reserved_memory_is_refused_to_others_before_it_is_filled() -> None:
    budget = MemoryBudget(MemoryUsage.current().anonymous_bytes + 100 * MB)
    with budget.reserve(60 * MB, "reading layer 1"):
        with pytest.raises(MemoryBudgetError, match="60.0 MB reserved and not filled yet"):
            budget.require(60 * MB, "reading layer 2")
        with pytest.raises(MemoryBudgetError):
            budget.reserve(60 * MB, "reading layer 2")
        budget.require(20 * MB, "computing layer 0")
    budget.require(60 * MB, "reading layer 2")


def test_filled_memory_is_not_counted_twice(fill: Callable[[int], torch.Tensor]) -> None:
    budget = MemoryBudget(MemoryUsage.current().anonymous_bytes + 100 * MB)
    with budget.reserve(60 * MB, "reading layer 1") as reservation:
        tensor = fill(60 * MB)
        # Without a word it is counted both as reserved and as held.
        with pytest.raises(MemoryBudgetError):
            budget.require(20 * MB, "computing layer 0")
        reservation.touched(40 * MB)
        reservation.touched(20 * MB)
        budget.require(20 * MB, "computing layer 0")
        with pytest.raises(MemoryBudgetError):
            budget.require(60 * MB, "reading layer 2")
    budget.require(20 * MB, "computing layer 0")
    assert tensor.nbytes == 60 * MB


def test_more_than_was_reserved_is_not_given_back() -> None:
    budget = MemoryBudget(MemoryUsage.current().anonymous_bytes + 100 * MB)
    first, second = budget.reserve(30 * MB, "one"), budget.reserve(30 * MB, "two")
    for give_back in (lambda: first.touched(50 * MB), first.release, first.release):
        give_back()
        with pytest.raises(MemoryBudgetError, match="30.0 MB reserved"):
            budget.require(90 * MB, "three")
    second.release()
    budget.require(80 * MB, "three")


def test_garbage_does_not_stand_in_the_way(fill: Callable[[int], torch.Tensor]) -> None:
    budget = MemoryBudget(MemoryUsage.current().anonymous_bytes + 100 * MB)
    circle: list[Any] = [fill(70 * MB)]
    circle.append(circle)
    del circle
    budget.require(70 * MB, "reading")


def test_memory_that_the_allocator_keeps_does_not_stand_in_the_way() -> None:
    budget = MemoryBudget(MemoryUsage.current().anonymous_bytes + 100 * MB)
    blocks = [bytearray(64_000) for _ in range(1100)]
    # The last one keeps the heap from shrinking.
    last = blocks[-1]
    del blocks
    budget.require(80 * MB, "reading")
    assert len(last) == 64_000


def test_threads_together_get_no_more_than_there_is() -> None:
    budget = MemoryBudget(MemoryUsage.current().anonymous_bytes + 5 * BLOCK + BLOCK // 2)
    granted = []
    asked = threading.Barrier(12)

    def ask() -> None:
        reservation = None
        with suppress(MemoryBudgetError):
            reservation = budget.reserve(BLOCK, "reading")
        asked.wait(timeout=30)
        if reservation is not None:
            granted.append(reservation)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 5


def test_error_in_the_block_releases_what_it_reserved() -> None:
    budget = MemoryBudget(MemoryUsage.current().anonymous_bytes + 100 * MB)
    with pytest.raises(RuntimeError, match="planted"), budget.reserve(60 * MB, "reading"):
        raise RuntimeError("planted")
    budget.require(60 * MB, "reading again")

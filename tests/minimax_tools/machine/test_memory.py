from __future__ import annotations

import sys
from collections.abc import Callable
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
    assert error.limit_bytes == 10 * MB
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
        in_use_bytes=204_000_000,
        limit_bytes=10**9,
    )
    assert "found 204.0 MB in use and 1.0 GB more needed" in str(error)
    # 1.234 GB in all: 1.2 would stop again.
    assert "234.0 MB too much. Allow 1.3GB or more" in str(error)


def test_what_the_process_holds_already_counts(fill: Callable[[int], torch.Tensor]) -> None:
    tensor = fill(BLOCK)
    with pytest.raises(MemoryBudgetError):
        MemoryBudget(tensor.nbytes).require(1, "anything")


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

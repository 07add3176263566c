from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from minimax_tools.machine.compiled import CorePool


@pytest.fixture(params=[1, 2], ids=["one core", "two cores"])
def cores(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [None, 1, 2])
def test_torch_computes_alone_in_each_thread_and_as_before_elsewhere(
    cores: int, num_threads: int | None
) -> None:
    before = torch.get_num_threads()
    with CorePool("test", num_threads) as pool:
        inside = list(pool.map(lambda _: torch.get_num_threads(), range(4)))
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert inside == [1, 1, 1, 1]
    assert torch.get_num_threads() == before
    assert later == [before]


def test_results_come_in_order_and_an_error_where_its_result_is_taken(cores: int) -> None:
    with CorePool("test") as pool:
        results = pool.map(lambda number: 6 // number, (1, 2, 0))
        assert [next(results), next(results)] == [6, 3]
        with pytest.raises(ZeroDivisionError):
            next(results)


def test_on_one_core_nothing_is_handed_to_a_thread(cores: int) -> None:
    with CorePool("test") as pool:
        threads = set(pool.map(lambda _: threading.get_ident(), range(4)))
    assert (threads == {threading.get_ident()}) is (cores == 1)

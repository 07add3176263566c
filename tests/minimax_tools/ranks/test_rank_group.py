"""A rank's words about ranks that died, without starting any."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from minimax_tools.errors import CannotRunError, CaptureError, UsageError
from minimax_tools.ranks.failure import RankLostError, ReportedElsewhereError
from minimax_tools.ranks.rank_group import InterruptedRunError, Interrupter, RankGroup, open_ranks
from minimax_tools.ranks.rank_place import RankPlace
from minimax_tools.ranks.watch import ALIVE, DONE, FAILED, Process, Watch, status_key

ALONE = RankPlace(rank=0, num_ranks=1, local_rank=0, num_local=1)
GONE = replace(Process.current(), pid=2**22 + 1)
ELSEWHERE = Process(pid=1, place="elsewhere")


def place(rank: int, num_ranks: int = 2) -> RankPlace:
    return RankPlace(rank=rank, num_ranks=num_ranks, local_rank=rank, num_local=num_ranks)


def ranks_of(store: Any, rank: int, *, watch: Watch | None = None) -> RankGroup:
    ranks = RankGroup(place(rank), store, watch=watch)
    ranks.assign(["a", "b"])
    return ranks


def watched(store: Any, *processes: Process, rank: int = 0) -> tuple[RankGroup, Watch]:
    """A rank and its watch, which looks when it is told to."""
    for number in range(len(processes)):
        store.set(status_key(number), ALIVE)
    watch = Watch(store, rank, processes, on_loss=lambda: None)
    return ranks_of(store, rank, watch=watch), watch


def test_failing_rank_gives_its_name_and_all_others_are_silent() -> None:
    store = HashStore()
    failing, _ = watched(store, Process.current(), Process.current(), rank=1)
    told = failing.fail(CaptureError("no space left to write x"))
    assert isinstance(told, CannotRunError)
    assert str(told) == "rank 1 (node b) failed: no space left to write x"
    assert store.get(status_key(1)).startswith(FAILED.encode())
    other, watch = ranks_of(store, 0), Watch(store, 0, [GONE, GONE], on_loss=lambda: None)
    other = ranks_of(store, 0, watch=watch)
    watch.look()
    with pytest.raises(ReportedElsewhereError):
        other.check()


def test_dead_rank_is_named_by_one_survivor() -> None:
    store = HashStore()
    ranks, watch = watched(store, Process.current(), GONE)
    ranks.check()
    watch.look()
    with pytest.raises(
        RankLostError, match=r"rank 1 \(node b\) failed: its process is gone: .* it resumes after the layers"
    ):
        ranks.check()
    with pytest.raises(ReportedElsewhereError):
        RankGroup(place(2, 3), store, watch=watch).check()


def test_rank_that_is_interrupted_while_it_names_the_dead_names_it_all_the_same() -> None:
    ranks, watch = watched(HashStore(), Process.current(), GONE)
    watch.look()
    with pytest.raises(RankLostError, match="rank 1"):
        # As from the thread that shows progress, or cut short by the watch's interrupt.
        ranks.check()
    assert str(ranks.fail(InterruptedRunError())).startswith("rank 1 (node b) failed")


def test_wait_for_a_dead_rank_ends() -> None:
    ranks, watch = watched(HashStore(), Process.current(), GONE)
    watch.start()
    with pytest.raises(RankLostError, match="rank 1"):
        ranks.wait_for("what nobody says")
    watch.stop()


def test_rank_that_was_stopped_names_who_died() -> None:
    ranks, watch = watched(HashStore(), Process.current(), GONE)
    watch.look()
    assert str(ranks.fail(InterruptedRunError())).startswith("rank 1 (node b) failed")


def test_rank_that_was_stopped_by_nobodys_death_says_so() -> None:
    ranks = ranks_of(HashStore(), 0)
    assert str(ranks.fail(InterruptedRunError())).startswith("rank 0 (node a) was told to stop")


def test_store_that_is_gone_is_told_by_everybody() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    watch = Watch(Gone(), 0, [Process.current(), ELSEWHERE], on_loss=lambda: None)
    ranks = ranks_of(Gone(), 0, watch=watch)
    watch.look()
    for _ in range(2):
        with pytest.raises(RankLostError, match="the store .* cannot be reached: Connection reset by peer"):
            ranks.publish("anything", 1)
    told = ranks.fail(KeyError("x"))
    assert str(told) == "rank 0 (node a) failed: unexpected KeyError: 'x'"


def test_error_that_all_ranks_have_is_told_once() -> None:
    store = HashStore()
    error = UsageError("no such plan")
    assert ranks_of(store, 0).fail(error) is error
    silent = ranks_of(store, 1).fail(error)
    assert isinstance(silent, ReportedElsewhereError)
    assert silent.exit_code == 2


def test_unexpected_error_is_told_with_its_class() -> None:
    told = ranks_of(HashStore(), 0).fail(MemoryError())
    assert str(told) == "rank 0 (node a) failed: MemoryError"
    assert told.exit_code == 3


def test_rank_0_that_has_all_parts_minds_no_death() -> None:
    ranks, watch = watched(HashStore(), Process.current(), GONE)
    watch.look()
    ranks.settle()
    ranks.check()
    ranks.leave()


def test_others_leave_when_rank_0_is_done() -> None:
    store = HashStore()
    ranks, watch = watched(store, GONE, Process.current(), rank=1)
    store.set(status_key(0), f"{DONE} 9")
    watch.start()
    ranks.leave()
    assert store.get(status_key(1)).startswith(DONE.encode())


def test_others_name_rank_0_where_it_dies_before_it_is_done() -> None:
    ranks, watch = watched(HashStore(), GONE, Process.current(), rank=1)
    watch.start()
    with pytest.raises(RankLostError, match=r"rank 0 \(node a\) failed"):
        ranks.leave()
    watch.stop()


def test_loss_interrupts_what_the_main_thread_does() -> None:
    store = HashStore()
    for rank in range(2):
        store.set(status_key(rank), ALIVE)
    with Interrupter() as interrupter:
        watch = Watch(store, 0, [Process.current(), GONE], on_loss=interrupter.interrupt)
        watch.start()
        with pytest.raises(InterruptedRunError):
            time.sleep(30)
    watch.stop()


def test_more_slices_than_ranks_are_refused_with_the_line_to_type() -> None:
    with open_ranks(ALONE) as ranks:
        with pytest.raises(
            UsageError, match="the plan has 3 slices for 1 rank: .*torchrun --nproc-per-node 3 -m"
        ):
            ranks.assign(["a", "b", "c"])


def test_one_rank_talks_to_itself() -> None:
    seen: list[bool] = []
    with open_ranks(ALONE) as ranks:
        ranks.assign(["a"])
        ranks.join(torch.device("cpu"))
        ranks.on_look(lambda: seen.append(ranks.is_published("value")))
        ranks.publish("value", [1, None])
        assert ranks.wait_for("value") == [1, None]
        ranks.settle()
        ranks.leave()
    assert seen == [True]


def test_one_rank_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with open_ranks(ALONE):
        assert signal.getsignal(signal.SIGTERM) == before

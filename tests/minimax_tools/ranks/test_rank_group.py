"""Errors of ranks over a store in this process; tests/gpu_reference/pipeline starts true ones."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed import HashStore

from minimax_tools.errors import CaptureError, UsageError
from minimax_tools.ranks.failure import RankFailedError, RankLostError, ReportedElsewhereError
from minimax_tools.ranks.rank_group import BackgroundCall, RankGroup, open_ranks
from minimax_tools.ranks.rank_place import RankPlace

ALONE = RankPlace()


def rank_of(store: HashStore, rank: int) -> RankGroup:
    ranks = RankGroup(RankPlace(rank=rank, num_ranks=2, local_rank=rank, num_local=2), store)
    ranks.assign(["a", "b"])
    return ranks


def test_first_rank_to_fail_reports_by_its_name_and_others_are_silent() -> None:
    store = HashStore()
    found = rank_of(store, 1).error_of(CaptureError("no space left to write x"))
    assert str(found) == "rank 1 (node b) failed: no space left to write x"
    assert isinstance(rank_of(store, 0).error_of(RankLostError("rank 1 is lost")), ReportedElsewhereError)


def test_wait_for_a_failed_rank_ends() -> None:
    store = HashStore()
    rank_of(store, 1).error_of(MemoryError("full"))
    with pytest.raises(RankFailedError, match=r"rank 1 \(node b\) failed: .* unexpected MemoryError: full"):
        rank_of(store, 0).wait_for("what nobody says")


def test_wrong_usage_keeps_its_exit_code_and_is_reported_once() -> None:
    store = HashStore()
    error = UsageError("no such plan")
    assert rank_of(store, 0).error_of(error) is error
    silent = rank_of(store, 1).error_of(error)
    assert isinstance(silent, ReportedElsewhereError)
    assert silent.exit_code == 2


def test_rank_that_is_stopped_says_that_the_run_resumes() -> None:
    told = rank_of(HashStore(), 0).error_of(KeyboardInterrupt())
    assert str(told).startswith("rank 0 (node a) was told to stop. Run the same command again")


def test_lost_store_is_named() -> None:
    class Gone(HashStore):
        def set(self, *_: object) -> None:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(RankLostError, match="the store .* cannot be reached: .*Connection reset by peer"):
        rank_of(Gone(), 0).publish("anything", 1)


def test_one_rank_talks_to_itself() -> None:
    with open_ranks(ALONE) as ranks:
        ranks.assign(["a"])
        ranks.join(torch.device("cpu"))
        ranks.publish("value", [1, None])
        assert ranks.wait_for("value") == [1, None]
        assert ranks.gather("own") == ["own"]
        with pytest.raises(
            UsageError, match="the plan has 3 slices for 1 rank: .*torchrun --nproc-per-node 3"
        ):
            ranks.assign(["a", "b", "c"])


def test_call_gives_what_its_call_gave() -> None:
    call = BackgroundCall(lambda: 7)
    assert call.is_over(10)
    assert (call.result, call.error) == (7, None)


def test_error_of_the_call_is_kept() -> None:
    call = BackgroundCall(lambda: 1 // 0)
    assert call.is_over(10)
    assert isinstance(call.error, ZeroDivisionError)


def test_call_that_does_not_end_is_left_behind() -> None:
    release = threading.Event()
    call = BackgroundCall(release.wait)
    assert not call.is_over(0.01)
    release.set()
    assert call.is_over(10)

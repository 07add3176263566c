"""Ranks and their failures over a store in this process; tests/gpu_reference/pipeline starts true ones."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from minimax_tools.errors import CaptureError, TargetError, UsageError
from minimax_tools.ranks.failure import (
    RankFailedError,
    RankFailure,
    RankLostError,
    RankTimeoutError,
    ReportedElsewhereError,
    failing_together,
    record_end,
)
from minimax_tools.ranks.rank_group import (
    BackgroundCall,
    RankGroup,
    RankPlace,
    open_ranks,
    warn_of_idle_cores,
)

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


def test_background_call_keeps_its_result_or_its_error() -> None:
    calls = [BackgroundCall(lambda: 7), BackgroundCall(lambda: 1 // 0)]
    assert all(call.is_over(10) for call in calls)
    assert (calls[0].result, calls[0].error) == (7, None)
    assert isinstance(calls[1].error, ZeroDivisionError)


def test_call_that_does_not_end_is_left_behind() -> None:
    release = threading.Event()
    call = BackgroundCall(release.wait)
    assert not call.is_over(0.01)
    release.set()
    assert call.is_over(10)


def test_ranks_on_two_machines_are_told_apart() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert RankPlace.from_environment(variables) == RankPlace(rank=3, num_ranks=4, local_rank=1, num_local=2)


def test_ranks_without_a_local_number_share_no_device() -> None:
    # As started by hand or by a scheduler that sets these two alone.
    places = [RankPlace.from_environment({"RANK": str(rank), "WORLD_SIZE": "4"}) for rank in range(4)]
    assert [place.local_rank for place in places] == [0, 1, 2, 3]
    on_two_machines = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert RankPlace.from_environment(on_two_machines).local_rank == 1


def test_process_that_no_launcher_started_is_the_only_rank() -> None:
    for variables in ({}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "1", "RANK": "0"}):
        assert RankPlace.from_environment(variables) == ALONE


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is no whole number: found two"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is no rank of 2: expected 0 to 1"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 0: expected 1 or more"),
    ],
)
def test_variables_that_make_no_sense_are_refused(variables: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        RankPlace.from_environment(variables)


def test_idle_cores_are_told_of_by_rank_0_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one_of_two = RankPlace(rank=0, num_ranks=2, local_rank=0, num_local=1)
    with caplog.at_level(logging.WARNING, logger="minimax_tools.ranks.rank_group"):
        warn_of_idle_cores(replace(one_of_two, rank=1))
        warn_of_idle_cores(ALONE)
        assert not caplog.text
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        warn_of_idle_cores(one_of_two)
        assert not caplog.text
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        warn_of_idle_cores(one_of_two)
    assert "OMP_NUM_THREADS is 1" in caplog.text


def test_first_failure_is_the_cause_of_all_later_ones() -> None:
    store = HashStore()
    with pytest.raises(TargetError, match="no such head"), failing_together(store, 1):
        raise TargetError("no such head")
    with pytest.raises(RankFailedError, match="^rank 1 failed: no such head$"), failing_together(store, 0):
        raise RuntimeError("gloo: connection closed by peer")


def test_failure_that_the_launcher_records_in_time_is_the_cause() -> None:
    store = HashStore()
    killed = RankFailure(rank=1, text="it was ended by SIGKILL")
    assert killed.record(store) == killed
    assert RankFailure(rank=0, text="anything").record(store) == killed


def test_rank_that_ended_without_an_error_explains_a_lost_connection() -> None:
    store = HashStore()
    record_end(store, 1)
    with pytest.raises(RankFailedError, match="rank 1 failed: it ended before"), failing_together(store, 0):
        raise RuntimeError("Connection reset by peer")


def test_wait_in_vain_names_the_rank_that_waited() -> None:
    store = HashStore()
    with pytest.raises(RankTimeoutError, match="rank 0 waited in vain"), failing_together(store, 0):
        raise RuntimeError("Timed out waiting 10000ms for recv operation to complete")


def test_single_rank_keeps_its_error() -> None:
    with pytest.raises(RuntimeError, match="^timed out$"), failing_together(None, 0):
        raise RuntimeError("timed out")

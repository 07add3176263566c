"""Failures: ranks learn which of them failed first, over a store in this process."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from minimax_tools.errors import TargetError
from minimax_tools.ranks.failure import (
    RankFailedError,
    RankFailure,
    RankTimeoutError,
    failing_together,
    record_end,
)


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

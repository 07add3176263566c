"""Ranks that meet, in threads of this process, in a store that may hold what others left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.distributed import HashStore

from minimax_tools.errors import CannotRunError
from minimax_tools.json_codec import encode
from minimax_tools.ranks.handshake import Meeting, meet
from minimax_tools.ranks.rank_place import RankPlace
from minimax_tools.ranks.watch import BackgroundCall, Process, status_key


def place(rank: int, num_ranks: int) -> RankPlace:
    return RankPlace(rank=rank, num_ranks=num_ranks, local_rank=rank, num_local=num_ranks)


def meet_all(store: Any, num_ranks: int) -> list[Meeting]:
    calls = [
        BackgroundCall(lambda rank=rank: meet(store, place(rank, num_ranks), patience_s=20))
        for rank in range(num_ranks)
    ]
    assert all(call.is_over(30) for call in calls)
    assert not any(call.error for call in calls)
    return [call.result for call in calls]


def test_ranks_that_meet_agree_on_the_attempt_and_on_who_they_are() -> None:
    store = HashStore()
    meetings = meet_all(store, 3)
    assert len({meeting.attempt for meeting in meetings}) == 1
    assert meetings[0].processes == (Process.current(),) * 3
    for rank in range(3):
        assert store.check([f"{meetings[0].attempt}/{status_key(rank)}"])


def test_what_an_attempt_before_left_in_the_store_is_nobodys() -> None:
    store = HashStore()
    first, second = meet_all(store, 2), meet_all(store, 2)
    assert first[0].attempt != second[0].attempt
    assert second[0].attempt == second[1].attempt


def test_answer_to_another_process_is_not_taken() -> None:
    store = HashStore()
    stranger = {"id": "0" * 32, **encode(Process.current())}
    store.set("answer", json.dumps({"nonce": "old", "hellos": [stranger, stranger]}))
    store.set("old/met", json.dumps([stranger, stranger]))
    with pytest.raises(CannotRunError, match="rank 1 got no answer from rank 0 within 0 s"):
        meet(store, place(1, 2), patience_s=0.2)


def test_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    others = BackgroundCall(lambda: meet(store, place(1, 3), patience_s=1))
    with pytest.raises(CannotRunError, match="^rank 2 did not come within 0 s"):
        meet(store, place(0, 3), patience_s=0.4)
    assert others.is_over(10)
    assert isinstance(others.error, CannotRunError)

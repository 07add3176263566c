"""Ranks that meet, in threads of this process, in a store that may hold what others left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.distributed import HashStore

from gpu_reference.ranks.background_call import Errand
from gpu_reference.ranks.handshake import Meeting, meet
from gpu_reference.ranks.process import Process
from gpu_reference.ranks.rank_place import RankPlace
from gpu_reference.ranks.watch import status_key
from minimax_tools.errors import CannotRunError
from minimax_tools.json_codec import encode


def place(rank: int, num_ranks: int) -> RankPlace:
    return RankPlace(rank=rank, num_ranks=num_ranks, local_rank=rank, num_local=num_ranks)


def meet_all(store: Any, num_ranks: int) -> list[Meeting]:
    errands = [
        Errand(lambda rank=rank: meet(store, place(rank, num_ranks), patience_s=20))
        for rank in range(num_ranks)
    ]
    assert all(errand.is_over(30) for errand in errands)
    assert not any(errand.error for errand in errands)
    return [errand.result for errand in errands]


def test_ranks_that_meet_agree_on_the_attempt_and_on_who_they_are() -> None:
    store = HashStore()
    meetings = meet_all(store, 3)
    assert len({meeting.nonce for meeting in meetings}) == 1
    assert meetings[0].processes == (Process.current(),) * 3
    for rank in range(3):
        assert store.check([f"{meetings[0].nonce}/{status_key(rank)}"])


def test_what_an_attempt_before_left_in_the_store_is_nobodys() -> None:
    store = HashStore()
    first, second = meet_all(store, 2), meet_all(store, 2)
    assert first[0].nonce != second[0].nonce
    assert second[0].nonce == second[1].nonce


def test_answer_to_another_process_is_not_taken() -> None:
    store = HashStore()
    stranger = {"id": "0" * 32, **encode(Process.current())}
    store.set("answer", json.dumps({"nonce": "old", "hellos": [stranger, stranger]}))
    store.set("old/met", json.dumps([stranger, stranger]))
    with pytest.raises(CannotRunError, match="rank 1 was not called by rank 0 within 0 s"):
        meet(store, place(1, 2), patience_s=0.2)


def test_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    others = Errand(lambda: meet(store, place(1, 3), patience_s=1))
    with pytest.raises(CannotRunError, match="^rank 2 did not come within 0 s"):
        meet(store, place(0, 3), patience_s=0.4)
    assert others.is_over(10)
    assert isinstance(others.error, CannotRunError)

"""What a rank says of others that died, seen without starting any."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from gpu_reference.ranks import RankPlace, Ranks, ToldError, open_ranks
from gpu_reference.watch import Watch
from minimax_tools.errors import CannotRunError, CaptureError, UsageError


def ranks_of(store: Any, rank: int, num_ranks: int = 2) -> Ranks:
    ranks = Ranks(RankPlace(rank=rank, num_ranks=num_ranks, local_rank=rank, num_local=num_ranks), store)
    ranks.assign(["a", "b", "c"][:num_ranks])
    return ranks


@pytest.fixture
def other() -> Any:
    """A process that stands for rank 1, and has made itself known."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def watch_with(store: Any, process: subprocess.Popen[bytes]) -> Watch:
    watch = Watch(store, 0, 2)
    who = json.loads(store.get("who/0"))
    store.set("who/1", json.dumps({**who, "pid": process.pid}))
    store.set("beat/1", "1")
    return watch


def test_killed_process_is_lost_and_a_living_one_is_not(other: subprocess.Popen[bytes]) -> None:
    watch = watch_with(HashStore(), other)
    watch.look()
    assert watch.lost == {}
    other.kill()
    other.wait()
    watch.look()
    assert watch.lost == {1: "its process is gone: killed, or out of memory"}


def test_rank_that_is_done_may_go(other: subprocess.Popen[bytes]) -> None:
    store = HashStore()
    watch = watch_with(store, other)
    store.set("done/1", "")
    other.kill()
    other.wait()
    watch.look()
    assert watch.lost == {}


def test_rank_that_has_not_begun_is_waited_for() -> None:
    watch = Watch(HashStore(), 0, 2)
    watch.look()
    assert watch.lost == {}


def test_failing_rank_gives_its_name_and_all_others_are_silent() -> None:
    store = HashStore()
    told = ranks_of(store, 1).fail(CaptureError("no space left to write x"))
    assert isinstance(told, CannotRunError)
    assert str(told) == "rank 1 (node b) failed: no space left to write x"
    watch = Watch(store, 0, 2)
    watch.look()
    assert watch.lost == {1: ""}


def test_error_that_all_ranks_have_is_told_once() -> None:
    store = HashStore()
    error = UsageError("no such plan")
    assert ranks_of(store, 0).fail(error) is error
    silent = ranks_of(store, 1).fail(error)
    assert isinstance(silent, ToldError)
    assert silent.exit_code == 2


def test_unexpected_error_is_told_with_its_class() -> None:
    told = ranks_of(HashStore(), 0).fail(MemoryError())
    assert str(told) == "rank 0 (node a) failed: MemoryError"
    assert told.exit_code == 3


def test_more_slices_than_ranks_are_refused_with_the_line_to_type() -> None:
    with open_ranks(RankPlace(rank=0, num_ranks=1, local_rank=0, num_local=1)) as ranks:
        with pytest.raises(
            UsageError, match="the plan has 3 slices for 1 rank: .*torchrun --nproc-per-node 3 -m"
        ):
            ranks.assign(["a", "b", "c"])


def test_one_rank_talks_to_itself() -> None:
    with open_ranks(RankPlace(rank=0, num_ranks=1, local_rank=0, num_local=1)) as ranks:
        ranks.assign(["a"])
        ranks.join(torch.device("cpu"))
        ranks.say("value", [1, None])
        assert ranks.ask("value") == [1, None]
        ranks.finish()

"""A watch of ranks, without starting any."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore

from minimax_tools.ranks.watch import ALIVE, DONE, FAILED, Process, Watch, status_key

ELSEWHERE = Process(pid=1, place="elsewhere")
GONE = replace(Process.current(), pid=2**22 + 1)


class BrokenStore:
    """A store whose machine is gone, or cut off."""

    def __init__(self, *, hangs: bool) -> None:
        self._hangs = hangs

    def set(self, key: str, value: str) -> None:
        if self._hangs:
            threading.Event().wait()
        raise RuntimeError("Broken pipe")


def watch_over(store: Any, *others: Process, calls: list[int] | None = None) -> Watch:
    for rank in range(len(others) + 1):
        store.set(status_key(rank), ALIVE)
    processes = [Process.current(), *others]
    return Watch(store, 0, processes, on_loss=lambda: None if calls is None else calls.append(1))


def test_killed_process_is_lost_and_a_living_one_is_not() -> None:
    watch = watch_over(HashStore(), Process.current(), GONE)
    watch.look()
    assert watch.lost == {2: "its process is gone: killed, or out of memory"}
    assert watch.has_loss


@pytest.mark.parametrize(("state", "lost"), [(DONE, {}), (FAILED, {1: ""})])
def test_rank_that_said_how_it_ended_may_go(state: str, lost: dict[int, str]) -> None:
    store = HashStore()
    watch = watch_over(store, GONE)
    store.set(status_key(1), f"{state} 7")
    watch.look()
    assert watch.lost == lost
    assert watch.is_done(1) == (state == DONE)


def run_rounds(watch: Watch, num_rounds: int) -> None:
    for _ in range(num_rounds):
        watch._num_rounds += 1
        watch.look()


def test_rank_elsewhere_that_gives_no_sign_of_life_is_lost_after_forty_seconds() -> None:
    watch = watch_over(HashStore(), ELSEWHERE)
    run_rounds(watch, 80)
    assert watch.lost == {}
    run_rounds(watch, 2)
    assert watch.lost == {1: "it gave no sign of life for 40 s"}


def test_rank_that_gives_signs_of_life_is_not_lost() -> None:
    store = HashStore()
    watch = watch_over(store, ELSEWHERE)
    for beat in range(4):
        store.set(status_key(1), f"{ALIVE} {beat}")
        run_rounds(watch, 60)
    assert watch.lost == {}


def test_every_look_is_a_sign_of_life() -> None:
    store = HashStore()
    watch = watch_over(store, ELSEWHERE)
    run_rounds(watch, 1)
    first = store.get(status_key(0))
    run_rounds(watch, 1)
    assert store.get(status_key(0)) != first


def test_store_that_broke_is_a_loss_of_no_rank() -> None:
    watch = Watch(BrokenStore(hangs=False), 0, [Process.current(), ELSEWHERE], on_loss=lambda: None)
    watch.look()
    assert (watch.lost, watch.store_fault) == ({}, "Broken pipe")
    assert watch.has_loss


@pytest.mark.slow
def test_store_that_hangs_is_a_loss_after_forty_seconds() -> None:
    calls: list[int] = []
    watch = Watch(BrokenStore(hangs=True), 0, [Process.current(), ELSEWHERE], on_loss=lambda: calls.append(1))
    watch.start()
    while not calls:
        time.sleep(0.1)
    assert watch.store_fault == "it did not answer for 40 s"
    watch.stop()


def test_first_loss_is_told_once_and_from_a_thread() -> None:
    calls: list[int] = []
    watch = watch_over(HashStore(), GONE, calls=calls)
    watch.start()
    while not calls:
        time.sleep(0.05)
    time.sleep(1.2)
    watch.stop()
    assert calls == [1]


def test_error_of_the_display_does_not_end_the_signs_of_life(caplog: pytest.LogCaptureFixture) -> None:
    shown: Sequence[int] = []
    watch = watch_over(HashStore(), ELSEWHERE)
    watch.on_look(lambda: shown[0])
    with caplog.at_level(logging.WARNING):
        run_rounds(watch, 3)
    assert caplog.text.count("Progress is not shown any more: list index out of range") == 1
    assert not watch.has_loss

from __future__ import annotations

import os
import signal
import threading

import pytest

from minimax_tools.ranks.rank_group import InterruptedRunError, Interrupter


def test_main_thread_is_interrupted_in_a_wait_for_a_lock() -> None:
    never = threading.Event()
    waits = []

    def wait(interrupter: Interrupter) -> None:
        threading.Timer(0.1, interrupter.interrupt).start()
        waits.append(never.wait(60))

    with Interrupter() as interrupter, pytest.raises(InterruptedRunError):
        wait(interrupter)
    assert not waits, "the wait ended by itself"


def test_signal_from_another_process_does_the_same() -> None:
    with Interrupter():
        with pytest.raises(InterruptedRunError):
            os.kill(os.getpid(), signal.SIGTERM)


def test_one_that_is_disarmed_interrupts_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupter() as interrupter:
        interrupter.disarm()
        interrupter.interrupt()
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_second_signal_lets_the_first_be_answered() -> None:
    with Interrupter():
        with pytest.raises(InterruptedRunError):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from gpu_reference.ranks.interrupt import InterruptedRunError, Stopper


def test_main_thread_is_interrupted_in_a_wait_for_a_lock() -> None:
    never = threading.Event()
    begun_s = time.monotonic()
    with Stopper() as stopper:
        threading.Timer(0.1, stopper.interrupt).start()
        with pytest.raises(InterruptedRunError):
            never.wait(30)
    assert time.monotonic() - begun_s < 10


def test_signal_from_another_process_does_the_same() -> None:
    with Stopper():
        with pytest.raises(InterruptedRunError):
            os.kill(os.getpid(), signal.SIGTERM)


def test_one_that_is_disarmed_interrupts_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stopper() as stopper:
        stopper.disarm()
        stopper.interrupt()
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_second_signal_lets_the_first_be_answered() -> None:
    with Stopper():
        with pytest.raises(InterruptedRunError):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

"""Ends of a process, in words."""

from __future__ import annotations

import signal

import pytest

from minimax_tools.errors import CannotRunError, TargetError
from neuron.process.record import Status
from neuron.process.supervisor import describe_end, end_error

RUNNING = Status(activity="running layer 3 of port p.py:P", is_in_port=True)


@pytest.mark.parametrize(
    ("exit_code", "status", "words"),
    [
        (0, RUNNING, "it ended with exit code 0, without a verdict, while running layer 3 of port p.py:P"),
        (-signal.SIGSEGV, RUNNING, "it was ended by SIGSEGV (a segmentation fault) while running layer 3"),
        (-signal.SIGUSR1, RUNNING, "it was ended by SIGUSR1 while running"),
        (-(signal.SIGRTMIN + 3), RUNNING, f"it was ended by signal {signal.SIGRTMIN + 3} while running"),
        (1, Status(last_activity="running layer 3 of port p.py:P"), "after running layer 3"),
        (1, Status(), "before it reached the port"),
    ],
)
def test_end_says_how_and_what_came_last(exit_code: int, status: Status, words: str) -> None:
    assert words in describe_end(exit_code, status)


def test_port_is_accused_of_what_it_was_running_alone() -> None:
    assert isinstance(end_error(0, RUNNING, ""), TargetError)
    assert not isinstance(end_error(0, Status(), ""), TargetError)
    assert isinstance(end_error(0, Status(), ""), CannotRunError)


def test_innermost_frames_of_a_stack_are_named() -> None:
    stack = 'Fatal Python error\n\nStack (most recent call first):\n  File "a.py", line 7 in inner\n'
    text = str(end_error(-signal.SIGABRT, RUNNING, stack + '  File "b.py", line 9 in forward\n'))
    assert "p.py:P, in inner (a.py:7), called by forward (b.py:9). Look there" in text

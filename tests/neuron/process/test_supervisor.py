"""Supervision of a port's process: its shared status, its end in words, and what it changes of its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.errors import CannotRunError, TargetError
from neuron.process.record import Status, StatusRecord
from neuron.process.status import port_state
from neuron.process.supervisor import describe_end, end_error

RUNNING = Status(activity="running layer 3 of port p.py:P", is_in_port=True)


@pytest.fixture
def record() -> Iterator[StatusRecord]:
    made = StatusRecord.create()
    yield made
    made.close()


def test_what_a_dead_process_told_last_is_read(
    record: StatusRecord, environment_of: Callable[..., dict[str, str]]
) -> None:
    told = Status(activity="running layer 3 of port ρ.py:Layer", is_in_port=True, limited_since_s=1.5)
    code = f"""
import os
from neuron.process.record import Status, StatusRecord
record = StatusRecord.attach({record.descriptor})
os.closerange(3, 256)
record.write({told!r})
os._exit(0)
"""
    command = [sys.executable, "-c", code]
    subprocess.run(command, pass_fds=(record.descriptor,), env=environment_of(), check=True)
    assert record.read() == told


def test_record_of_another_process_is_attached_by_its_descriptor(record: StatusRecord) -> None:
    other = StatusRecord.attach(os.dup(record.descriptor))
    other.write(Status(exit_code=1))
    assert record.read().exit_code == 1
    other.close()


def test_half_a_status_is_not_taken_for_one(record: StatusRecord) -> None:
    record.write(Status(activity="building"))
    assert record.read().activity == "building"
    os.pwrite(record.descriptor, b"????", 20)
    assert record.read() == Status(activity="building")


def test_names_of_any_length_fit(record: StatusRecord) -> None:
    record.write(Status(activity="\U0001f600" * 100_000, last_activity="\udcff" * 100_000, exit_code=3))
    assert record.read().exit_code == 3
    assert record.read_stack() == ""


@pytest.mark.parametrize(
    ("status", "is_overdue"),
    [
        (Status(limited_since_s=10.0, limit_s=5.0), True),
        (Status(limited_since_s=10.0, limit_s=20.0), False),
        (Status(limited_since_s=10.0, limit_s=0.0), False),
        (Status(limited_since_s=None, limit_s=5.0), False),
        (Status(limited_since_s=10.0, limit_s=5.0, exit_code=0), False),
    ],
)
def test_limit_counts_from_where_the_stretch_began(status: Status, is_overdue: bool) -> None:
    assert status.is_overdue(20.0) is is_overdue


def test_time_suspended_does_not_count() -> None:
    status = Status(limited_since_s=10.0, limit_s=5.0)
    assert not status.is_overdue(20.0, resumed_s=16.0)
    assert status.is_overdue(22.0, resumed_s=16.0)


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


def process_state() -> tuple[Any, ...]:
    umask = os.umask(0)
    os.umask(umask)
    return Path.cwd(), umask, sys.stdout, sys.stderr, signal.getsignal(signal.SIGTERM)


def disturb(folder: Path) -> None:
    os.chdir(folder)
    os.umask(0o777)
    sys.stdout = sys.stderr = sys.__stdin__
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_what_a_port_changes_is_mm2s_again_and_the_ports_in_its_next_block(tmp_path: Path) -> None:
    before = process_state()
    with port_state():
        disturb(tmp_path)
        changed = process_state()
        with port_state():  # blocks nest
            assert process_state() == changed
        assert process_state() == changed
    assert process_state() == before
    assert before != changed
    with port_state():
        assert process_state() == changed
        for value, was in zip(process_state(), before, strict=True):
            assert value != was
        os.chdir(before[0])
        os.umask(before[1])
        sys.stdout, sys.stderr = before[2], before[3]
        signal.signal(signal.SIGTERM, before[4])
    with port_state():
        assert process_state() == before


def test_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    before = Path.cwd()
    with port_state():
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
    assert Path.cwd() == before
    with port_state():
        assert Path.cwd() == before

"""The status that a process shares: read after its death, and never half."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuron.process.record import Status, StatusRecord


@pytest.fixture
def record() -> Iterator[StatusRecord]:
    made = StatusRecord.create()
    yield made
    made.close()


def test_what_a_dead_process_told_last_is_read(record: StatusRecord) -> None:
    told = Status(activity="running layer 3 of port ρ.py:Layer", is_in_port=True, limited_since_s=1.5)
    code = f"""
import os
from neuron.process.record import Status, StatusRecord
record = StatusRecord.attach({record.descriptor})
os.closerange(3, 256)
record.write({told!r})
os._exit(0)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", code]
    subprocess.run(command, pass_fds=(record.descriptor,), env=environment, check=True)
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

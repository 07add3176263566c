from __future__ import annotations

import json
from pathlib import Path

import pytest

from minimax_tools.capture.read_record import ReadRecord
from minimax_tools.errors import CannotRunError

BEGUN = ReadRecord.begun("a", plan="p")


def test_one_attempt_counts_what_it_read_twice_twice() -> None:
    record = BEGUN.followed_by({"x": 10, "y": 5}, {"x": 20, "y": 5})
    assert (record.tensors, record.bytes_asked, record.bytes_read) == (("x", "y"), 15, 25)
    assert record.bytes_read_again == 0


def test_attempts_add_up_and_what_is_read_again_stands_apart() -> None:
    first = BEGUN.followed_by({"x": 10, "y": 5}, {"x": 10, "y": 5})
    second = first.followed_by({"y": 5, "z": 2}, {"y": 5, "z": 4})
    assert (second.tensors, second.bytes_asked, second.bytes_read) == (("x", "y", "z"), 17, 19)
    assert second.bytes_read_again == 5


def test_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = BEGUN.followed_by({"x": 10}, {"x": 10}).followed_by({"x": 10}, {"x": 10})
    assert ReadRecord.read(record.write(tmp_path / "records")) == record


def test_record_of_an_earlier_version_has_no_attempts(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"node": "a", "tensors": ["x"], "bytes_read": 1, "bytes_asked": 1}')
    record = ReadRecord.read(tmp_path / "a.json")
    assert (record.bytes_read_again, record.plan) == (0, "")


@pytest.mark.parametrize("value", [-1, 10**400, 1.5, True, "1", None])
def test_record_of_bytes_that_none_can_read_is_refused_by_name(tmp_path: Path, value: object) -> None:
    path = BEGUN.write(tmp_path / "records")
    path.write_text(json.dumps({**json.loads(path.read_text()), "bytes_read": value}))
    with pytest.raises(CannotRunError, match=r"a\.json is no read record: found .*(bytes_read|whole number)"):
        ReadRecord.read(path)


def test_record_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotRunError, match=r"cannot write the read record .*a\.json: found .*xists"):
        BEGUN.write(tmp_path / "file")

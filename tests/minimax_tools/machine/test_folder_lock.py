from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from minimax_tools.errors import CaptureError
from minimax_tools.machine.files import LOCK_NAME, locked_directory


def test_directory_is_made_and_its_lock_goes_with_the_block(tmp_path: Path) -> None:
    directory = tmp_path / "a/b"
    with locked_directory(directory):
        assert [path.name for path in directory.iterdir()] == [LOCK_NAME]
    assert list(directory.iterdir()) == []


def test_second_run_is_kept_out_and_leaves_the_lock_alone(tmp_path: Path) -> None:
    with locked_directory(tmp_path):
        for _ in range(2):
            with pytest.raises(
                CaptureError, match=f"the output directory {tmp_path} is in use by another run"
            ):
                with locked_directory(tmp_path):
                    pass
        assert (tmp_path / LOCK_NAME).exists()
    with locked_directory(tmp_path):
        pass


def test_lock_that_a_killed_run_left_holds_nobody_off(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).touch()
    with locked_directory(tmp_path):
        pass


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns after almost every instruction."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_no_two_runs_are_in_at_once_however_they_come_and_go(tmp_path: Path) -> None:
    alone, together = [], []

    def come_and_go() -> None:
        for _ in range(300):
            try:
                with locked_directory(tmp_path):
                    # Another run in here would take this file away when it leaves.
                    (alone if (tmp_path / LOCK_NAME).exists() else together).append(1)
            except CaptureError:
                continue

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone
    assert not together


def test_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CaptureError, match="cannot make or lock the capture directory .*file: found File exists"
    ):
        with locked_directory(tmp_path / "file"):
            pass

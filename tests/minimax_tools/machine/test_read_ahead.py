"""Reading ahead: files come into the system's page cache, and nothing is said of files that are not there."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from minimax_tools.checkpoint.shard_files import is_cached
from minimax_tools.machine.files import read_ahead

SIZE = 6_000_000


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def holds(path: Path) -> bool:
    """Decide whether the page cache holds the middle of a file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return is_cached(file.fileno(), 0, SIZE)


def test_files_come_into_the_page_cache(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for path in files:
        path.write_bytes(os.urandom(SIZE))
        drop(path)
    if any(holds(path) for path in files):
        pytest.skip("this file system keeps files in memory, or does not tell whether it does")
    # A look fetches what it looked at.
    for path in files:
        drop(path)
    read_ahead([files[0], tmp_path / "missing", files[1]])
    wait_for_threads()
    deadline = time.monotonic() + 60
    while not all(holds(path) for path in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_missing_files_end_no_thread_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    read_ahead([tmp_path / "missing", tmp_path])
    wait_for_threads()
    assert not errors


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "mm2-read-ahead":
            thread.join(60)

"""Files and folders: whole or absent, locked by living processes, removed after killed ones, read ahead."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from minimax_tools.checkpoint.shard_files import is_cached
from minimax_tools.errors import CaptureError, CheckpointError
from minimax_tools.machine.files import (
    LOCK_NAME,
    is_plain_name,
    is_temporary,
    locked_directory,
    new_folder,
    read_ahead,
    remove_abandoned,
    temporary_beside,
    whole_capture_file,
    whole_file,
)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def fail_halfway(path: Path) -> None:
    with whole_capture_file(path) as temporary:
        temporary.write_text("half")
        raise OSError("planted")


def test_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text("old")
    with pytest.raises(CaptureError, match=r"cannot write .*manifest\.json: found planted"):
        fail_halfway(path)
    assert path.read_text() == "old"
    with whole_capture_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert is_temporary(temporary.parent)
    assert path.read_text() == "new"
    assert names(tmp_path) == ["manifest.json"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        safetensors.SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_is_told_apart_with_the_free_space(tmp_path: Path, error: Exception) -> None:
    message = rf"no space left to write {tmp_path}/a\.json: found [\d.]+ MB free"
    with pytest.raises(CaptureError, match=message), whole_capture_file(tmp_path / "a.json"):
        raise error


def test_others_may_read_what_safetensors_wrote(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    with whole_capture_file(tmp_path / "a.safetensors") as temporary:
        safetensors.torch.save_file({"x": torch.ones(2)}, temporary)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_folder_is_there_when_its_block_ends_well(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError), new_folder(tmp_path / "new", size_bytes=1, remedy="Make room."):
        raise OSError("planted")
    assert names(tmp_path) == []
    with new_folder(tmp_path / "new", size_bytes=1, remedy="Make room.") as folder:
        (folder / "file").write_text("text")
    assert names(tmp_path) == ["new"]
    assert (tmp_path / "new/file").read_text() == "text"


def test_error_of_reading_another_file_names_that_file(tmp_path: Path) -> None:
    missing, output = tmp_path / "source/config.json", tmp_path / "target/new"
    with (
        pytest.raises(CheckpointError, match=f"^{missing} cannot be read: found No such file") as caught,
        new_folder(output, size_bytes=1, remedy="Make room.") as folder,
    ):
        shutil.copyfile(missing, folder / "config.json")
    assert str(output) not in str(caught.value)
    assert not list(output.parent.iterdir())


def test_error_of_writing_names_the_output(tmp_path: Path) -> None:
    output = tmp_path / "new"
    with (
        pytest.raises(CheckpointError, match=f"^{output} cannot be written: found .*Is a directory"),
        new_folder(output, size_bytes=1, remedy="Make room.") as folder,
    ):
        folder.write_text("text")
    assert not output.exists()


Write = Callable[[Path], object]


def write_text(path: Path) -> None:
    with whole_file(path) as file:
        file.write("whole")


def write_tensors(path: Path) -> None:
    with whole_capture_file(path) as temporary:
        safetensors.torch.save_file({"x": torch.ones(2)}, temporary)


def write_folder(path: Path) -> None:
    with new_folder(path, size_bytes=1, remedy="Make room.") as folder:
        (folder / "file").write_text("whole")


def kill_while_writing(path: Path) -> Path:
    """Kill a process that is writing `path`, and return what it leaves."""
    process = os.fork()
    if process == 0:
        with temporary_beside(path) as written:
            written.write_text("half")
            # As safetensors does.
            (written.parent / ".tmpAb3xYz").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    (left,) = (one for one in path.parent.iterdir() if is_temporary(one))
    assert set(names(left)) == {".lock", f".{path.name}.tmp", ".tmpAb3xYz"}
    return left


@pytest.mark.parametrize("write", [write_text, write_tensors, write_folder])
def test_next_writer_of_the_name_removes_what_a_killed_one_left(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "a[1].json"
    kill_while_writing(path)
    write(path)
    assert names(tmp_path) == ["a[1].json"]


@pytest.mark.parametrize("write", [write_text, write_tensors, write_folder])
def test_two_writers_of_a_name_never_mix(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "name"
    with temporary_beside(path) as written:
        written.write_text("of the first writer")
        write(path)
        remove_abandoned(tmp_path)
        assert written.read_text() == "of the first writer"
    assert names(tmp_path) == ["name"]


def test_other_names_are_left_to_their_own_writers(tmp_path: Path) -> None:
    left = kill_while_writing(tmp_path / "name")
    write_text(tmp_path / "other")
    assert left.exists()
    remove_abandoned(tmp_path)
    assert names(tmp_path) == ["other"]


def test_writer_that_was_killed_before_its_lock_is_known(tmp_path: Path) -> None:
    (tmp_path / ".name.0123abcd.tmp").mkdir()
    write_text(tmp_path / "name")
    assert names(tmp_path) == ["name"]


def test_what_is_being_written_is_found_by_no_search_for_files(tmp_path: Path) -> None:
    with temporary_beside(tmp_path / "a.safetensors") as written:
        written.write_text("half")
        (tmp_path / "b.safetensors").touch()
        assert [path.name for path in tmp_path.rglob("*.safetensors") if path.is_file()] == ["b.safetensors"]


def test_directory_is_made_and_its_lock_goes_with_the_block(tmp_path: Path) -> None:
    directory = tmp_path / "a/b"
    with locked_directory(directory):
        assert names(directory) == [LOCK_NAME]
    assert names(directory) == []
    # A lock that a killed run left holds nobody off.
    (directory / LOCK_NAME).touch()
    with locked_directory(directory):
        pass


def test_second_run_is_kept_out_and_leaves_the_lock_alone(tmp_path: Path) -> None:
    message = f"the output directory {tmp_path} is in use by another run"
    with locked_directory(tmp_path):
        for _ in range(2):
            with pytest.raises(CaptureError, match=message), locked_directory(tmp_path):
                pass
        assert (tmp_path / LOCK_NAME).exists()
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
    message = "cannot make or lock the capture directory .*file: found File exists"
    with pytest.raises(CaptureError, match=message), locked_directory(tmp_path / "file"):
        pass


def test_name_is_plain_if_a_folder_holds_it_and_it_leads_nowhere_else() -> None:
    for name in ("a", "model-00001-of-00004.safetensors", "ü b", "x" * 255):
        assert is_plain_name(name), name
    for name in ("", ".", "..", "a/b", "/a", "a\0", "a\nb", "\x1b[31m", "x" * 256, "ü" * 128):
        assert not is_plain_name(name), name


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

"""The model of the disk shows what fsync is for: without it, a file may have its final name and not its data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from torture.disk_model import LostPower, losses
from torture.disk_trace import DiskCall, find_missing, trace_command

FOLDER = Path("/disk")
FINAL, TEMPORARY = FOLDER / "file", FOLDER / ".file.tmp"
WRITING = (
    DiskCall(kind="mkdir", path=FOLDER),
    DiskCall(kind="sync", path=FOLDER.parent),
    DiskCall(kind="create", path=TEMPORARY, is_new=True),
    DiskCall(kind="write", path=TEMPORARY, data=b"wh"),
    DiskCall(kind="write", path=TEMPORARY, data=b"ole"),
)
FLUSH = DiskCall(kind="sync", path=TEMPORARY)
RENAME = DiskCall(kind="rename", path=TEMPORARY, target=FINAL)
FLUSH_NAME = DiskCall(kind="sync", path=FOLDER)


def contents_of(states: list[LostPower]) -> set[bytes | None]:
    return {state.contents.get(FINAL) for state in states}


def test_data_that_were_not_flushed_may_be_lost_half_there_or_zeros() -> None:
    assert contents_of(list(losses((*WRITING, RENAME), final=FOLDER))) == {
        None,
        b"",
        b"wh",
        bytes(5),
        b"whole",
    }


def test_data_that_were_flushed_are_there_under_every_name() -> None:
    assert contents_of(list(losses((*WRITING, FLUSH, RENAME), final=FOLDER))) == {None, b"whole"}


@pytest.mark.parametrize("is_flushed", [True, False])
def test_name_is_there_for_sure_once_its_folder_was_flushed(is_flushed: bool) -> None:
    later = Path("/other/later")
    calls = (
        *WRITING,
        FLUSH,
        RENAME,
        *((FLUSH_NAME,) if is_flushed else ()),
        DiskCall(kind="create", path=later, is_new=True),
        DiskCall(kind="sync", path=later.parent),
    )
    found = contents_of([state for state in losses(calls, final=FOLDER) if later in state.contents])
    assert found == ({b"whole"} if is_flushed else {b"whole", None})


def test_file_written_last_may_outlive_an_earlier_one() -> None:
    listing = FOLDER / "listing"
    calls = (
        *WRITING,
        RENAME,
        DiskCall(kind="create", path=listing, is_new=True),
        DiskCall(kind="write", path=listing, data=b"file"),
    )
    assert any(
        state.contents.get(listing) == b"file" and state.contents.get(FINAL) == b""
        for state in losses(calls, final=FOLDER)
    )


@pytest.mark.skipif(find_missing() is not None, reason=f"{find_missing()}")
def test_trace_tells_what_a_process_wrote(tmp_path: Path) -> None:
    code = (
        f"import os, pathlib; folder = pathlib.Path('{tmp_path}/made'); folder.mkdir(); "
        "file = (folder / '.a').open('w'); "
        "file.write('text'); file.flush(); os.fsync(file.fileno()); os.rename(folder / '.a', folder / 'a')"
    )
    exit_code, calls = trace_command(
        [sys.executable, "-c", code], below=tmp_path, log=tmp_path.with_name("calls")
    )
    assert exit_code == 0
    assert [(call.kind, call.path.name, call.data) for call in calls] == [
        ("mkdir", "made", b""),
        ("create", ".a", b""),
        ("write", ".a", b"text"),
        ("sync", ".a", b""),
        ("rename", ".a", b""),
    ]

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from peaks import RESIDENT, Watched, memory_bytes, tree_bytes, watch

MEGABYTE = 1 << 20


class Holding:
    """A process that holds memory until samples were taken of it, and gives it back before it ends.

    Its gauge is read after each sample: at the second reading since the memory is held, one sample has seen it.
    """

    def __init__(self, folder: Path, code: str) -> None:
        self._held, self._seen = folder / "held", folder / "seen"
        self._num_readings = 0
        code += f"""
import pathlib, time
pathlib.Path({str(self._held)!r}).touch()
while not pathlib.Path({str(self._seen)!r}).exists(): time.sleep(0.01)
held = None
"""
        self.words = [sys.executable, "-c", code]

    def watch(self, words: list[str] | None = None) -> Watched:
        return watch(words or self.words, gauges={"readings": self._read})

    def _read(self) -> int:
        self._num_readings += self._held.exists()
        if self._num_readings == 2:
            self._seen.touch()
        return 0


@pytest.fixture
def hold(tmp_path: Path) -> Callable[[int], Holding]:
    def make(num_megabytes: int) -> Holding:
        folder = tmp_path / str(num_megabytes)
        folder.mkdir()
        return Holding(folder, f"held = bytearray(b'1') * ({num_megabytes} << 20)")

    return make


def test_peak_is_what_a_process_held_at_most(hold: Callable[[int], Holding]) -> None:
    little, much = hold(1).watch(), hold(101).watch()
    risen = much.peak_anonymous_bytes - little.peak_anonymous_bytes
    assert risen == pytest.approx(100 * MEGABYTE, abs=2 * MEGABYTE)
    assert much.peak_resident_bytes >= much.peak_anonymous_bytes


def test_memory_of_a_child_counts(hold: Callable[[int], Holding]) -> None:
    child = hold(101)
    started = f"import subprocess; subprocess.run({child.words!r})"
    assert child.watch([sys.executable, "-c", started]).peak_anonymous_bytes > 100 * MEGABYTE


def test_file_that_is_mapped_is_no_anonymous_memory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(64 * MEGABYTE))
    code = f"""
import mmap
held = mmap.mmap(open({str(file)!r}, "rb").fileno(), 0, access=mmap.ACCESS_READ)
sum(held[position] for position in range(0, len(held), 4096))
"""
    watched = Holding(tmp_path, code).watch()
    assert watched.peak_anonymous_bytes < 32 * MEGABYTE
    assert watched.peak_resident_bytes > 64 * MEGABYTE


def test_exit_code_and_environment_are_the_process_own() -> None:
    code = "import os, sys; sys.exit(int(os.environ['CODE']))"
    assert watch([sys.executable, "-c", code], environment={"CODE": "7"}).exit_code == 7


def test_gauge_sees_what_the_process_left_at_its_end(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'left')!r}, 'wb').write(bytes(1 << 20))"
    watched = watch([sys.executable, "-c", code], gauges={"left": lambda: tree_bytes(tmp_path)})
    assert watched.peaks["left"] == MEGABYTE


def test_tree_counts_all_but_what_is_left_out(tmp_path: Path) -> None:
    for name, num_bytes in (("a", 4096), ("kept/b", 8192), ("left/out/c", 16384)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1" * num_bytes)
    assert tree_bytes(tmp_path) == 4096 + 8192 + 16384
    assert tree_bytes(tmp_path, without=(tmp_path / "left",)) == 4096 + 8192


def test_status_without_memory_is_that_of_a_process_that_ended() -> None:
    status = "Name:\tpython\nVmRSS:\t  20 kB\nRssAnon:\t  12 kB\n"
    assert (memory_bytes(status), memory_bytes(status, RESIDENT)) == (12 * 1024, 20 * 1024)
    assert memory_bytes("Name:\tpython\nState:\tZ (zombie)\n") == 0

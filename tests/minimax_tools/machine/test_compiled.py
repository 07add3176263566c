from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from minimax_tools.machine.compiled import CorePool

LOOPS = """
import numpy as np
from minimax_tools.machine.compiled import compiled

@compiled("(float64[::1],)")
def add_up(values):
    total = 0.0
    for i in range(values.size):
        total += values[i]
    return total

@compiled("(float32[::1],)", "(float64[::1],)")
def double(values):
    return values.itemsize * 2

@compiled("(float64[::1],)")
def name_nothing(values):
    return values.no_such_thing
"""


@pytest.fixture
def load_loops(load_module: Callable[[Path], ModuleType], tmp_path: Path) -> Callable[[], ModuleType]:
    """Loads the loops anew: machine code that was made before must come from a file, if at all."""

    def load() -> ModuleType:
        path = tmp_path / "loops.py"
        if not path.exists():  # numba compares the time of its last change
            path.write_text(LOOPS)
        return load_module(path)

    return load


def test_a_loop_takes_each_of_its_types_and_no_other(load_loops: Callable[[], ModuleType]) -> None:
    double = load_loops().double
    assert (double(np.zeros(1, np.float32)), double(np.zeros(1))) == (8, 16)
    with pytest.raises(TypeError):
        double(np.zeros(1, np.int32))


def test_only_one_process_at_a_time_makes_the_machine_code_of_a_loop(
    load_loops: Callable[[], ModuleType], tmp_path: Path
) -> None:
    load_loops().double(np.zeros(1))
    (lock,) = tmp_path.rglob("loops.double-lock")
    widths: list[int] = []
    double = load_loops().double
    other = threading.Thread(target=lambda: widths.append(double(np.zeros(1))))
    with lock.open("a") as file:
        # As another process holds it: the lock belongs to the opened file.
        fcntl.flock(file, fcntl.LOCK_EX)
        other.start()
        other.join(timeout=1.0)
        assert other.is_alive()
    other.join()
    assert widths == [16]


def test_it_works_where_nothing_can_be_written(
    load_loops: Callable[[], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__pycache__").write_text("a file, so that nothing can be written below it")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "__pycache__" / "home"))
    assert load_loops().add_up(np.arange(5.0)) == 10.0
    assert not list(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize("suffix", ["nbi", "nbc", "json"])
def test_machine_code_of_other_bytes_is_never_loaded(
    load_loops: Callable[[], ModuleType], tmp_path: Path, suffix: str
) -> None:
    load_loops().add_up(np.arange(5.0))
    (kept,) = tmp_path.rglob(f"loops.add_up*.{suffix}")
    content = kept.read_bytes()
    middle = len(content) // 2
    random_part = os.urandom(len(content) - middle)
    for damaged in (content[:-40], content[:middle] + random_part):
        kept.write_bytes(damaged)
        assert load_loops().add_up(np.arange(5.0)) == 10.0
    assert random_part not in kept.read_bytes()


def test_machine_code_is_kept_beside_the_source_and_not_made_again(
    load_loops: Callable[[], ModuleType], tmp_path: Path
) -> None:
    assert load_loops().add_up(np.arange(5.0)) == 10.0
    (kept,) = tmp_path.rglob("loops.add_up*.nbc")
    written_ns = kept.stat().st_mtime_ns
    assert load_loops().add_up(np.arange(5.0)) == 10.0
    assert kept.stat().st_mtime_ns == written_ns


@pytest.fixture(params=[1, 2], ids=["one core", "two cores"])
def cores(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [None, 1, 2])
def test_torch_computes_alone_in_each_thread_and_as_before_elsewhere(
    cores: int, num_threads: int | None
) -> None:
    before = torch.get_num_threads()
    with CorePool("test", num_threads) as pool:
        inside = list(pool.map(lambda _: torch.get_num_threads(), range(4)))
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert inside == [1, 1, 1, 1]
    assert torch.get_num_threads() == before
    assert later == [before]


def test_results_come_in_order_and_an_error_where_its_result_is_taken(cores: int) -> None:
    with CorePool("test") as pool:
        results = pool.map(lambda number: 6 // number, (1, 2, 0))
        assert [next(results), next(results)] == [6, 3]
        with pytest.raises(ZeroDivisionError):
            next(results)


def test_on_one_core_nothing_is_handed_to_a_thread(cores: int) -> None:
    with CorePool("test") as pool:
        threads = set(pool.map(lambda _: threading.get_ident(), range(4)))
    assert (threads == {threading.get_ident()}) is (cores == 1)

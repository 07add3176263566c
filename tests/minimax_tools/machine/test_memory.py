"""Sizes in words, memory of this process, budgets and peaks of it, and what a container still allows."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from minimax_tools.errors import CannotRunError
from minimax_tools.machine.memory import (
    MemoryBudget,
    MemoryBudgetError,
    MemoryPeak,
    MemoryUsage,
    available_bytes,
    cgroup_headroom_bytes,
)
from minimax_tools.machine.size import format_size, parse_size

pytestmark = pytest.mark.usefixtures("freed_before")
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the kinds of memory apart")

MB = 10**6
BLOCK = 64 * MB
# What Python, the allocator and other threads may take meanwhile.
SLACK = 12 * MB


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("12GB", 12 * 10**9),
        ("40GiB", 40 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        (" 8 mb ", 8 * 10**6),
        ("64mIb", 2**26),
        # As binary fractions these would come out a byte short.
        ("4.35GB", 4_350_000_000),
        ("1.1KB", 1100),
    ],
)
def test_size_is_whole_bytes_of_its_unit(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "12", "1e3GB", "-1GB", "1,5GB", "12G", ".5GB", "٣GB"])
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: expected a number and a unit, for example 500MB"):
        parse_size(text)


def test_size_is_worded_in_the_largest_unit_it_fills() -> None:
    sizes = (0, 1000, 12_340_000_000, 999_949_999, 999_960_000, -4_200_000)
    words = ["0 B", "1.0 kB", "12.3 GB", "999.9 MB", "1.0 GB", "-4.2 MB"]
    assert [format_size(size) for size in sizes] == words


@linux
def test_need_above_the_budget_stops_before_it_is_taken() -> None:
    before = MemoryUsage.current().anonymous_bytes
    budget = MemoryBudget(before + BLOCK)
    budget.require(BLOCK // 2, "reading layer 6")
    with pytest.raises(MemoryBudgetError):
        budget.require(2 * BLOCK, "reading layer 7")
    assert MemoryUsage.current().anonymous_bytes - before < SLACK


@linux
def test_error_names_purpose_need_use_limit_and_way_out() -> None:
    budget = MemoryBudget(10 * MB)
    with pytest.raises(MemoryBudgetError) as caught:
        budget.require(500 * MB, "reading layer 7")
    error = caught.value
    assert isinstance(error, CannotRunError)
    assert (error.exit_code, error.purpose, error.needed_bytes) == (3, "reading layer 7", 500 * MB)
    assert error.limit_bytes == 10 * MB
    assert abs(error.in_use_bytes - MemoryUsage.current().anonymous_bytes) < SLACK
    assert str(error).startswith(
        "reading layer 7 would break the memory budget: expected at most 10.0 MB, found "
    )
    assert " in use and 500.0 MB more needed: " in str(error)
    assert "or ask for less at a time: no prefetch, fewer or shorter prompts." in str(error)


def test_budget_that_the_error_names_is_enough() -> None:
    error = MemoryBudgetError(
        "reading", needed_bytes=1_030_000_000, in_use_bytes=204_000_000, limit_bytes=10**9
    )
    assert "found 204.0 MB in use and 1.0 GB more needed" in str(error)
    # 1.234 GB in all: 1.2 would stop again.
    assert "234.0 MB too much. Allow 1.3GB or more" in str(error)


@linux
def test_what_the_process_holds_already_counts(fill: Callable[[int], torch.Tensor]) -> None:
    tensor = fill(BLOCK)
    with pytest.raises(MemoryBudgetError):
        MemoryBudget(tensor.nbytes).require(1, "anything")


@linux
def test_garbage_does_not_stand_in_the_way(fill: Callable[[int], torch.Tensor]) -> None:
    budget = MemoryBudget(MemoryUsage.current().anonymous_bytes + 100 * MB)
    circle: list[Any] = [fill(70 * MB)]
    circle.append(circle)
    del circle
    budget.require(70 * MB, "reading")


@linux
def test_memory_that_the_allocator_keeps_does_not_stand_in_the_way() -> None:
    budget = MemoryBudget(MemoryUsage.current().anonymous_bytes + 100 * MB)
    blocks = [bytearray(64_000) for _ in range(1100)]
    # The last one keeps the heap from shrinking.
    last = blocks[-1]
    del blocks
    budget.require(80 * MB, "reading")
    assert len(last) == 64_000


STATUS = """\
Name:	python
VmHWM:	    5000 kB
VmRSS:	    4100 kB
RssAnon:	    3000 kB
RssFile:	    1000 kB
RssShmem:	     100 kB
VmSwap:	      20 kB
Threads:	1
"""


def test_status_of_linux_is_read_in_bytes() -> None:
    usage = MemoryUsage.from_status(STATUS)
    assert usage == MemoryUsage(
        anonymous_bytes=3000 * 1024,
        file_bytes=1000 * 1024,
        shared_bytes=100 * 1024,
        swapped_bytes=20 * 1024,
        most_resident_bytes=5000 * 1024,
    )
    assert usage.resident_bytes == 4100 * 1024


def test_where_kinds_are_not_told_apart_all_resident_memory_counts_and_is_labelled() -> None:
    usage = MemoryUsage.undivided()
    assert not usage.are_kinds_known
    assert abs(usage.anonymous_bytes - psutil.Process().memory_info().rss) < SLACK
    assert (usage.file_bytes, usage.shared_bytes) == (0, 0)


@linux
def test_written_tensor_is_anonymous(fill: Callable[[int], torch.Tensor]) -> None:
    before = MemoryUsage.current()
    tensor = fill(BLOCK)
    after = MemoryUsage.current()
    assert after.are_kinds_known
    assert BLOCK <= after.anonymous_bytes - before.anonymous_bytes + SLACK <= BLOCK + 2 * SLACK
    assert abs(after.file_bytes - before.file_bytes) < SLACK
    del tensor
    assert MemoryUsage.current().anonymous_bytes - before.anonymous_bytes < SLACK


@linux
def test_mapped_file_is_not_anonymous(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * BLOCK)
    before = MemoryUsage.current()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == -(-BLOCK // mmap.PAGESIZE)
        after = MemoryUsage.current()
    # A temporary folder in memory is shared memory to the kernel.
    grown = after.file_bytes + after.shared_bytes - before.file_bytes - before.shared_bytes
    assert grown > BLOCK - SLACK
    assert after.anonymous_bytes - before.anonymous_bytes < SLACK


def test_reading_does_not_start_cuda() -> None:
    was = torch.cuda.is_initialized()
    usage = MemoryUsage.current()
    assert torch.cuda.is_initialized() == was
    assert was or not usage.device_bytes


@pytest.mark.gpu
def test_tensor_on_a_device_is_counted_there() -> None:
    kept = torch.ones(1, device="cuda:0")
    before = MemoryUsage.current().device_bytes["cuda:0"]
    tensor = torch.ones(BLOCK, dtype=torch.uint8, device="cuda:0")
    assert MemoryUsage.current().device_bytes["cuda:0"] - before >= BLOCK
    del tensor
    after = MemoryUsage.current()
    assert after.device_bytes["cuda:0"] == before
    assert after.most_device_bytes["cuda:0"] >= before + BLOCK
    assert kept.item() == 1


def test_peak_takes_each_number_at_its_own_moment(usage: Callable[..., MemoryUsage]) -> None:
    peak, start = MemoryPeak(), usage(1, file=1)
    for later in (usage(9, file=2), usage(3, file=7, gpu=4)):
        peak = peak.raised_by(later, since=start)
    assert (peak.anonymous_bytes, peak.file_bytes, peak.resident_bytes) == (9, 7, 11)
    assert peak.device_bytes == {"cuda:0": 4}


@pytest.mark.parametrize(("most", "gpu_most", "expected"), [(51, 61, (51, 61)), (50, 60, (2, 3))])
def test_counters_count_only_if_they_rose_since_the_start(
    usage: Callable[..., MemoryUsage], most: int, gpu_most: int, expected: tuple[int, int]
) -> None:
    start, later = usage(1, most=50, gpu_most=60), usage(2, most=most, gpu=3, gpu_most=gpu_most)
    peak = MemoryPeak().raised_by(later, since=start)
    assert (peak.resident_bytes, peak.all_devices_bytes) == expected


def group(folder: str, **files: object) -> dict[str, object]:
    return {f"sys/fs/cgroup/{folder}memory.{name}": content for name, content in files.items()}


def machine(root: Path, groups: str, files: dict[str, object]) -> Path:
    """The files of a machine on which a process is in these groups."""
    for name, content in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n", encoding="ascii")
    return root


STAT = f"anon {40 * MB}\nfile {70 * MB}\nactive_file {20 * MB}\ninactive_file {50 * MB}"
STAT_OF_1 = f"total_active_file {MB}\ntotal_inactive_file {2 * MB}\nactive_file 0"
PODS = {
    **group("pod/job/", max="max", current=10 * MB),
    **group("pod/", max=200 * MB, current=150 * MB),
    **group("", max=900 * MB, current=150 * MB),
}
OF_1 = group("memory/box/", limit_in_bytes=100 * MB, usage_in_bytes=90 * MB, stat=STAT_OF_1)


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        pytest.param("0::/job", group("job/", max=300 * MB, current=120 * MB), 180 * MB, id="limit"),
        pytest.param(
            "0::/job",
            group("job/", max=100 * MB, current=100 * MB, stat=STAT),
            70 * MB,
            id="page cache counts as free",
        ),
        pytest.param("0::/pod/job", PODS, 50 * MB, id="tightest group above counts"),
        pytest.param(
            "0::/system.slice/docker-1f.scope",
            group("", max=300 * MB, current=100 * MB),
            200 * MB,
            id="path that a container does not see leads to its mount",
        ),
        pytest.param("9:name=systemd:/\n5:cpu,memory:/box\n0::/", OF_1, 13 * MB, id="first version"),
        pytest.param("0::/job", {}, None, id="no files"),
        pytest.param("0::/job", group("job/", max="max", current=5), None, id="no limit"),
        pytest.param("0::/job", group("job/", max=100), None, id="no use"),
    ],
)
def test_limit_of_the_control_groups_less_what_is_used_is_left(
    tmp_path: Path, groups: str, files: dict[str, object], left: int | None
) -> None:
    assert cgroup_headroom_bytes(root=machine(tmp_path, groups, files)) == left


def test_available_memory_is_the_groups_where_that_is_less(tmp_path: Path) -> None:
    assert cgroup_headroom_bytes(root=tmp_path) is None
    tight = machine(tmp_path / "tight", "0::/job", group("job/", max=3 * MB, current=MB))
    assert available_bytes(root=tight) == 2 * MB
    wide = machine(tmp_path / "wide", "0::/job", group("job/", max=10**18, current=MB))
    total = psutil.virtual_memory().total
    assert 0 < available_bytes(root=wide) <= total
    assert 0 < available_bytes() <= total

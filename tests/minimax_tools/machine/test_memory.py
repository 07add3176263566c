"""Memory of this process: budgets, readings and peaks, and what a container still allows."""

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

pytestmark = pytest.mark.usefixtures("freed_before")
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the kinds of memory apart")

MB = 10**6
BLOCK = 64 * MB
# What Python, the allocator and other threads may take meanwhile.
SLACK = 12 * MB


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
        "reading",
        needed_bytes=1_030_000_000,
        in_use_bytes=204_000_000,
        limit_bytes=10**9,
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
def test_written_tensor_is_anonymous() -> None:
    before = MemoryUsage.current()
    # In pages of its own, which are gone with it: the allocator might take a hole that it keeps.
    pages = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE)
    tensor = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    after = MemoryUsage.current()
    assert after.are_kinds_known
    assert BLOCK <= after.anonymous_bytes - before.anonymous_bytes + SLACK <= BLOCK + 2 * SLACK
    assert abs(after.file_bytes - before.file_bytes) < SLACK
    del tensor, pages
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
    start = usage(1, file=1)
    peak = (
        MemoryPeak().raised_by(usage(9, file=2), since=start).raised_by(usage(3, file=7, gpu=4), since=start)
    )
    assert (peak.anonymous_bytes, peak.file_bytes, peak.resident_bytes) == (9, 7, 11)
    assert peak.device_bytes == {"cuda:0": 4}


def test_counters_that_rose_since_the_start_count(usage: Callable[..., MemoryUsage]) -> None:
    start = usage(1, most=50, gpu_most=60)
    peak = MemoryPeak().raised_by(usage(2, most=51, gpu=3, gpu_most=61), since=start)
    assert (peak.resident_bytes, peak.all_devices_bytes) == (51, 61)


def test_peaks_before_the_start_do_not_count(usage: Callable[..., MemoryUsage]) -> None:
    start = usage(1, most=50, gpu_most=60)
    peak = MemoryPeak().raised_by(usage(2, most=50, gpu=3, gpu_most=60), since=start)
    assert (peak.resident_bytes, peak.all_devices_bytes) == (2, 3)


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n", encoding="ascii")
    return root


def second_version(folder: str, **files: object) -> dict[str, object]:
    return {f"sys/fs/cgroup/{folder}memory.{name}": content for name, content in files.items()}


def first_version(folder: str, **files: object) -> dict[str, object]:
    return {f"sys/fs/cgroup/memory/{folder}memory.{name}": content for name, content in files.items()}


def test_limit_less_what_is_used_is_left(tmp_path: Path) -> None:
    files = second_version("job/", max=300 * MB, current=120 * MB)
    assert cgroup_headroom_bytes(root=write(tmp_path, {"proc/self/cgroup": "0::/job", **files})) == 180 * MB


def test_page_cache_counts_as_free(tmp_path: Path) -> None:
    stat = f"anon {40 * MB}\nfile {70 * MB}\nactive_file {20 * MB}\ninactive_file {50 * MB}"
    files = second_version("job/", max=100 * MB, current=100 * MB, stat=stat)
    assert cgroup_headroom_bytes(root=write(tmp_path, {"proc/self/cgroup": "0::/job", **files})) == 70 * MB


def test_tightest_group_above_counts(tmp_path: Path) -> None:
    files = {
        **second_version("pod/job/", max="max", current=10 * MB),
        **second_version("pod/", max=200 * MB, current=150 * MB),
        **second_version("", max=900 * MB, current=150 * MB),
    }
    root = write(tmp_path, {"proc/self/cgroup": "0::/pod/job", **files})
    assert cgroup_headroom_bytes(root=root) == 50 * MB


def test_path_that_a_container_does_not_see_leads_to_its_mount(tmp_path: Path) -> None:
    files = second_version("", max=300 * MB, current=100 * MB)
    root = write(tmp_path, {"proc/self/cgroup": "0::/system.slice/docker-1f.scope", **files})
    assert cgroup_headroom_bytes(root=root) == 200 * MB


def test_first_version_is_read_too(tmp_path: Path) -> None:
    stat = f"total_active_file {MB}\ntotal_inactive_file {2 * MB}\nactive_file 0"
    files = first_version("box/", limit_in_bytes=100 * MB, usage_in_bytes=90 * MB, stat=stat)
    groups = "9:name=systemd:/\n5:cpu,memory:/box\n0::/"
    assert cgroup_headroom_bytes(root=write(tmp_path, {"proc/self/cgroup": groups, **files})) == 13 * MB


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/job"},
        {"proc/self/cgroup": "0::/job", **second_version("job/", max="max", current=5)},
        {"proc/self/cgroup": "0::/job", **second_version("job/", max=100)},
    ],
)
def test_without_a_limit_there_is_none(files: dict[str, object], tmp_path: Path) -> None:
    assert cgroup_headroom_bytes(root=write(tmp_path, files)) is None


def test_available_memory_is_the_groups_where_that_is_less(tmp_path: Path) -> None:
    tight = second_version("job/", max=3 * MB, current=MB)
    assert available_bytes(root=write(tmp_path / "tight", {"proc/self/cgroup": "0::/job", **tight})) == 2 * MB
    wide = second_version("job/", max=10**18, current=MB)
    total = psutil.virtual_memory().total
    root = write(tmp_path / "wide", {"proc/self/cgroup": "0::/job", **wide})
    assert 0 < available_bytes(root=root) <= total
    assert 0 < available_bytes() <= total

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from minimax_tools.machine.memory import (
    MemoryPeak,
    MemoryUsage,
)

pytestmark = pytest.mark.usefixtures("freed_before")
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the kinds of memory apart")

MB = 10**6
BLOCK = 64 * MB
# What Python, the allocator and other threads may take meanwhile.
SLACK = 12 * MB

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

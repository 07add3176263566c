from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.machine.memory import MemoryPeak, MemorySnapshot, MemoryUsage
from minimax_tools.machine.memory_tracker import MemoryTracker, describe_change, describe_summary

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the kinds of memory apart"),
    pytest.mark.usefixtures("freed_before"),
]

MB = 10**6
GB = 10**9
BLOCK = 64 * MB
# What Python, the allocator and other threads may take meanwhile.
SLACK = 12 * MB


def samplers() -> list[threading.Thread]:
    """The trackers' threads; others of this process come and go."""
    return [thread for thread in threading.enumerate() if thread.name == "memory sampler"]


def wait_for_samples() -> None:
    """Wait until each sampler has gone to sleep a few times, and so has taken a sample in between."""
    ends = {thread: num_sleeps(thread) + 3 for thread in samplers()}
    deadline = time.monotonic() + 120
    while any(num_sleeps(thread) < end for thread, end in ends.items()):
        assert time.monotonic() < deadline, "the sampler takes no samples"
        time.sleep(0.01)


def num_sleeps(thread: threading.Thread) -> int:
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.fixture
def spike(fill: Callable[[int], torch.Tensor]) -> Callable[[], None]:
    """Takes memory that is gone before anyone looks, and is there for many samples."""

    def take_and_free() -> None:
        tensor = fill(BLOCK)
        wait_for_samples()
        del tensor

    return take_and_free


def test_spike_between_snapshots_is_seen(spike: Callable[[], None]) -> None:
    with MemoryTracker() as tracker:
        before = tracker.snapshot("before")
        spike()
        after = tracker.snapshot("after")
        later = tracker.snapshot("later")
    assert after.usage.anonymous_bytes - before.usage.anonymous_bytes < SLACK
    assert after.peak_anonymous_bytes - before.usage.anonymous_bytes > BLOCK - SLACK
    # The spike belongs to the one interval.
    assert later.peak_anonymous_bytes - after.usage.anonymous_bytes < SLACK
    assert tracker.peak.anonymous_bytes >= after.peak_anonymous_bytes


def test_tracker_that_never_started_misses_it_and_says_so(spike: Callable[[], None]) -> None:
    tracker = MemoryTracker()
    before = tracker.snapshot("before")
    spike()
    assert tracker.snapshot("after").peak_anonymous_bytes - before.usage.anonymous_bytes < SLACK
    assert "Seen at snapshots only: nothing was sampled between them." in tracker.summary_text


def test_resident_peak_is_exact_without_sampling_where_it_is_the_highest_so_far(
    fill: Callable[[int], torch.Tensor],
) -> None:
    tracker = MemoryTracker()
    most = tracker.baseline.most_resident_bytes
    assert most is not None
    size_bytes = most - tracker.baseline.resident_bytes + BLOCK
    tensor = fill(size_bytes)
    del tensor
    assert tracker.peak.resident_bytes >= most + BLOCK - SLACK


def test_report_is_the_latest_snapshot_against_the_one_before(fill: Callable[[int], torch.Tensor]) -> None:
    tracker = MemoryTracker()
    tracker.snapshot("start")
    tensor = fill(BLOCK)
    tracker.snapshot("bottom loaded")
    lines = tracker.report_text.splitlines()
    del tensor
    assert lines[0] == "Memory: bottom loaded"
    assert lines[1].startswith("  RAM: ")
    assert lines[1].endswith(("(+0.06 GB)", "(+0.07 GB)"))
    assert lines[2] == "  GPU: 0.00 GB (+0.00 GB)" or torch.cuda.is_initialized()


def test_report_and_summary_print_to_stdout(capfd: Any) -> None:
    tracker = MemoryTracker()
    tracker.snapshot("one")
    tracker.report()
    out, err = capfd.readouterr()
    assert out.startswith("Memory: one\n  RAM: ")
    tracker.summary()
    out, more_err = capfd.readouterr()
    assert out.startswith("=== Memory Usage Summary ===\nPeak RAM: ")
    assert err + more_err == ""


def test_current_usage_is_a_dict_of_bytes() -> None:
    now = MemoryTracker().get_current_usage()
    assert now["ram_bytes"] == now["anonymous_bytes"] + now["file_bytes"] + now["shared_bytes"]
    assert abs(now["anonymous_bytes"] - MemoryUsage.current().anonymous_bytes) < SLACK
    assert now["available_bytes"] > 0
    assert now["gpu_bytes"] >= 0


@pytest.mark.gpu
def test_spike_on_a_device_is_seen_without_a_sample_of_it() -> None:
    kept = torch.ones(1, device="cuda:0")
    for _ in range(2):
        with MemoryTracker() as tracker:
            before = tracker.snapshot("before").usage.device_bytes["cuda:0"]
            tensor = torch.ones(BLOCK, dtype=torch.uint8, device="cuda:0")
            del tensor
        assert tracker.peak.device_bytes["cuda:0"] >= before + BLOCK
    with MemoryTracker() as tracker:
        pass
    assert tracker.peak.device_bytes["cuda:0"] < before + BLOCK
    assert kept.item() == 1


def test_changes_and_summaries_name_the_kinds_that_are_known(
    usage: Callable[..., MemoryUsage], expect_text: Any
) -> None:
    before, after = usage(8 * GB, file=GB), usage(12_340_000_000, file=GB // 2, gpu=2 * GB)
    devices = {"cuda:0": GB, "cuda:1": 2 * GB}
    peak = MemoryPeak(
        anonymous_bytes=30 * GB, file_bytes=3 * GB, resident_bytes=32_450_000_000, device_bytes=devices
    )
    snapshots = [
        # As wide as 24 Latin characters: these two take four cells.
        MemorySnapshot(label="开始", usage=usage(8 * GB, file=120 * MB), peak_anonymous_bytes=8 * GB),
        MemorySnapshot(label="loaded", usage=usage(29 * GB, gpu=2 * GB), peak_anonymous_bytes=30 * GB),
    ]
    whole = MemoryUsage(anonymous_bytes=GB, are_kinds_known=False)
    undivided = MemorySnapshot(label="now", usage=whole, peak_anonymous_bytes=GB)
    texts = {
        "change": describe_change("bottom loaded", before, after),
        "summary": describe_summary(peak, snapshots, notes=["A note."]),
        "change where kinds are not known": describe_change("now", whole, whole),
        "summary where kinds are not known": describe_summary(MemoryPeak(), [undivided], notes=[]),
    }
    expect_text("memory.txt", texts)

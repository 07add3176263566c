"""A record of this process's memory: labelled snapshots, the peaks between them, and a summary as text."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import click
import torch
from rich.cells import cell_len

from minimax_tools.machine.memory import MemoryPeak, MemorySnapshot, MemoryUsage, available_bytes

# Least width of a snapshot's label in the summary, in cells of a terminal.
_LABEL_CELLS = 24


class MemoryTracker:
    """A record of this process's memory: labelled snapshots, and the peaks between them.

        with MemoryTracker() as tracker:
            tracker.snapshot("start")
            load()
            tracker.snapshot("loaded")
        tracker.summary()  # prints the peaks, and each snapshot

    `report` and `summary` print to stdout; `report_text` and `summary_text` return the same.

    A thread samples the host's memory between `start` and `stop`, so that peaks between snapshots count. Peaks shorter
    than `interval_s`, or within a call that holds Python's lock, may be missed. Without `start` only snapshots count.

    Args:
        interval_s: Seconds between samples. A hundred samples a second take one or two percent of a core.
    """

    def __init__(self, *, interval_s: float = 0.01) -> None:
        self.baseline = MemoryUsage.current()
        self.snapshots: tuple[MemorySnapshot, ...] = ()
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._sampler: threading.Thread | None = None
        self._was_sampled = False
        # The reading against which peaks count that the kernel and torch recorded: older peaks are not this tracker's.
        self._reading_at_start = self.baseline
        self._peak = MemoryPeak()
        self._peak_since_snapshot = 0
        self._record(self.baseline)

    def __enter__(self) -> MemoryTracker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to sample, unless sampling already. Torch's peak counters of all devices are reset."""
        if self._sampler is not None:
            return
        if torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
        self._reading_at_start = MemoryUsage.current()
        self._record(self._reading_at_start)
        self._was_sampled = True
        self._stopped.clear()
        self._sampler = threading.Thread(target=self._sample, name="memory sampler", daemon=True)
        self._sampler.start()

    def stop(self) -> None:
        """Take a last sample and end sampling; snapshots stay."""
        if self._sampler is None:
            return
        self._stopped.set()
        self._sampler.join()
        self._sampler = None
        self._record(MemoryUsage.current())

    def snapshot(self, label: str) -> MemorySnapshot:
        """Read the memory now, and keep the reading under `label`."""
        usage = MemoryUsage.current()
        self._record(usage)
        with self._lock:
            snapshot = MemorySnapshot(
                label=label, usage=usage, peak_anonymous_bytes=self._peak_since_snapshot
            )
            self.snapshots += (snapshot,)
            self._peak_since_snapshot = usage.anonymous_bytes
        return snapshot

    @property
    def peak(self) -> MemoryPeak:
        """The peak so far, with a reading of now. After `stop` only snapshots raise it."""
        if self._sampler is not None or not self._was_sampled:
            self._record(MemoryUsage.current())
        return self._peak

    def get_current_usage(self) -> dict[str, int]:
        """Return the memory now, in bytes: in all, by kind, on devices, and still available."""
        usage = MemoryUsage.current()
        return {
            "ram_bytes": usage.resident_bytes,
            "anonymous_bytes": usage.anonymous_bytes,
            "file_bytes": usage.file_bytes,
            "shared_bytes": usage.shared_bytes,
            "gpu_bytes": usage.all_devices_bytes,
            "available_bytes": available_bytes(),
        }

    def report(self) -> None:
        """Print the latest snapshot, or without one the memory now, and its change from the one before."""
        click.echo(self.report_text)

    def summary(self) -> None:
        """Print the peaks, and every snapshot on a line of its own."""
        click.echo(self.summary_text)

    @property
    def report_text(self) -> str:
        """The latest snapshot, or without one the memory now, and its change from the one before."""
        if not self.snapshots:
            return describe_change("now", self.baseline, MemoryUsage.current())
        before = self.snapshots[-2].usage if len(self.snapshots) > 1 else self.baseline
        return describe_change(self.snapshots[-1].label, before, self.snapshots[-1].usage)

    @property
    def summary_text(self) -> str:
        """The peaks, and every snapshot on a line of its own."""
        notes = []
        if not self._was_sampled:
            notes.append("Seen at snapshots only: nothing was sampled between them.")
        if not self.baseline.are_kinds_known:
            notes.append("This system does not tell the kinds apart: anonymous is all resident memory.")
        return describe_summary(self.peak, self.snapshots, notes=notes)

    def _sample(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._record(MemoryUsage.on_host())

    def _record(self, usage: MemoryUsage) -> None:
        with self._lock:
            self._peak = self._peak.raised_by(usage, since=self._reading_at_start)
            self._peak_since_snapshot = max(self._peak_since_snapshot, usage.anonymous_bytes)


def describe_change(label: str, before: MemoryUsage, after: MemoryUsage) -> str:
    """Describe the reading `after`, and its change from `before`, in a few lines."""
    lines = [
        f"Memory: {label}",
        f"  RAM: {_change(before.resident_bytes, after.resident_bytes)}",
        f"  GPU: {_change(before.all_devices_bytes, after.all_devices_bytes)}",
    ]
    if after.are_kinds_known:
        lines += [
            f"  anonymous: {_change(before.anonymous_bytes, after.anonymous_bytes)}",
            f"  file-backed: {_change(before.file_bytes, after.file_bytes)}",
        ]
    return "\n".join(lines)


def describe_summary(peak: MemoryPeak, snapshots: Sequence[MemorySnapshot], *, notes: Sequence[str]) -> str:
    """Describe the peaks, then `notes` on what was not measured, then each snapshot on a line."""
    devices = "".join(f", {device} {_gb(num_bytes)}" for device, num_bytes in peak.device_bytes.items())
    lines = [
        "=== Memory Usage Summary ===",
        f"Peak RAM: {_gb(peak.resident_bytes)}",
        f"Peak anonymous: {_gb(peak.anonymous_bytes)}",
        f"Peak file-backed: {_gb(peak.file_bytes)}",
        f"Peak GPU: {_gb(peak.all_devices_bytes)}{devices if len(peak.device_bytes) > 1 else ''}",
        *notes,
        "",
        "Timeline:",
    ]
    cells = max([_LABEL_CELLS, *(cell_len(snapshot.label) + 2 for snapshot in snapshots)])
    return "\n".join([*lines, *(_timeline_line(snapshot, cells=cells) for snapshot in snapshots)])


def _timeline_line(snapshot: MemorySnapshot, *, cells: int) -> str:
    usage = snapshot.usage
    # Counted in cells of a terminal, since a Chinese character takes two.
    label = snapshot.label + " " * (cells - cell_len(snapshot.label))
    columns = {"RAM": usage.resident_bytes, "GPU": usage.all_devices_bytes}
    if usage.are_kinds_known:
        columns |= {"anonymous": usage.anonymous_bytes, "file-backed": usage.file_bytes}
        columns |= {"anonymous peak": snapshot.peak_anonymous_bytes}
    return f"  {label}" + "  ".join(f"{name}: {_gb(num_bytes):>9}" for name, num_bytes in columns.items())


def _change(before_bytes: int, after_bytes: int) -> str:
    return f"{_gb(after_bytes)} ({(after_bytes - before_bytes) / 1e9:+.2f} GB)"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"

"""Memory of this process: a record of what it holds and held, and a budget for what it may hold.

| kind | memory |
|---|---|
| anonymous | allocated and written to; budgets count this kind |
| file-backed | pages of mapped files, which the system drops and reads again as it likes |
| device | tensors of torch on each CUDA device |
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from minimax_tools.errors import CannotRunError
from minimax_tools.machine.cgroup import cgroup_headroom_bytes
from minimax_tools.machine.memory_usage import (
    MemoryPeak,
    MemorySnapshot,
    MemoryUsage,
    word_change,
    word_summary,
)
from minimax_tools.machine.size import word_size

__all__ = [
    "MemoryBudget",
    "MemoryBudgetError",
    "MemoryTracker",
    "MemoryUsage",
    "Reservation",
    "available_bytes",
    "give_back_freed_memory",
    "give_back_freed_pages",
]


class MemoryBudgetError(CannotRunError):
    """A step that would break the memory budget; nothing was allocated for it yet.

    Args:
        purpose: Purpose of the memory, as in "reading layer 7".
        needed_bytes: Bytes that the step needs.
        in_use_bytes: Anonymous memory of the process now.
        promised_bytes: Bytes that are reserved and not filled yet.
        limit_bytes: Limit of the budget.
    """

    def __init__(
        self, purpose: str, *, needed_bytes: int, in_use_bytes: int, promised_bytes: int, limit_bytes: int
    ) -> None:
        self.purpose = purpose
        self.needed_bytes = needed_bytes
        self.in_use_bytes = in_use_bytes
        self.promised_bytes = promised_bytes
        self.limit_bytes = limit_bytes
        total_bytes = in_use_bytes + promised_bytes + needed_bytes
        promised = f", {word_size(promised_bytes)} reserved and not filled yet" if promised_bytes else ""
        super().__init__(
            f"{purpose} would break the memory budget",
            expected=f"at most {word_size(limit_bytes)}",
            found=(
                f"{word_size(in_use_bytes)} in use{promised} and {word_size(needed_bytes)} more needed: "
                f"{word_size(total_bytes - limit_bytes)} too much"
            ),
            next_step=(
                f"Allow {_round_up(total_bytes)} or more, or ask for less at a time: "
                "no prefetch, fewer or shorter prompts."
            ),
        )


def available_bytes(*, root: Path = Path("/")) -> int:
    """Return the bytes that this process can still take without swapping, within the machine and its cgroup.

    Args:
        root: Folder of `proc` and `sys`.
    """
    available = psutil.virtual_memory().available
    headroom = cgroup_headroom_bytes(root=root)
    return available if headroom is None else min(available, headroom)


class MemoryTracker:
    """A record of this process's memory: labelled snapshots, and the peaks between them.

        with MemoryTracker() as tracker:
            tracker.snapshot("start")
            load()
            tracker.snapshot("loaded")
        print(tracker.summary())

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
        self._counted_before = self.baseline
        self._peak = MemoryPeak()
        self._peak_since_snapshot = 0
        self._see(self.baseline)

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
        self._counted_before = MemoryUsage.current()
        self._see(self._counted_before)
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
        self._see(MemoryUsage.current())

    def snapshot(self, label: str) -> MemorySnapshot:
        """Read the memory now, and keep the reading under `label`."""
        usage = MemoryUsage.current()
        self._see(usage)
        with self._lock:
            snapshot = MemorySnapshot(
                label=label, usage=usage, peak_anonymous_bytes=self._peak_since_snapshot
            )
            self.snapshots += (snapshot,)
            self._peak_since_snapshot = usage.anonymous_bytes
        return snapshot

    @property
    def peak(self) -> MemoryPeak:
        """The peak so far. After `stop` only snapshots raise it."""
        if self._sampler is not None or not self._was_sampled:
            self._see(MemoryUsage.current())
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

    def report(self) -> str:
        """Describe the latest snapshot and its change from the one before, in a few lines."""
        if not self.snapshots:
            return word_change("now", self.baseline, MemoryUsage.current())
        before = self.snapshots[-2].usage if len(self.snapshots) > 1 else self.baseline
        return word_change(self.snapshots[-1].label, before, self.snapshots[-1].usage)

    def summary(self) -> str:
        """Describe the peaks, and every snapshot on a line of its own."""
        notes = []
        if not self._was_sampled:
            notes.append("Seen at snapshots only: nothing was sampled between them.")
        if not self.baseline.are_kinds_known:
            notes.append("This system does not tell the kinds apart: anonymous is all resident memory.")
        return word_summary(self.peak, self.snapshots, notes=notes)

    def _sample(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._see(MemoryUsage.on_host())

    def _see(self, usage: MemoryUsage) -> None:
        with self._lock:
            self._peak = self._peak.raised_by(usage, since=self._counted_before)
            self._peak_since_snapshot = max(self._peak_since_snapshot, usage.anonymous_bytes)


class MemoryBudget:
    """A limit on this process's anonymous memory, imports included, to check before memory is taken.

    Allocated memory shows in no reading until it is written to. So reserve memory that is filled later, or by several
    threads. A reservation counts until it is filled or released:

        with budget.reserve(layer_bytes, "reading layer 7") as reservation:
            storage = [torch.empty(...), ...]
            for tensor in storage:
                fill(tensor)
                reservation.touched(tensor.nbytes)

    Memory that is reused needs no check: it is resident already. Any thread may call.

    Args:
        limit_bytes: Limit on the process's anonymous memory, swapped out or not; None for no limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"a memory budget must be positive, not {limit_bytes}")
        self.limit_bytes = limit_bytes
        self._promised_bytes = 0
        # Reentrant: collecting garbage may release a reservation.
        self._lock = threading.RLock()

    @classmethod
    def unlimited(cls) -> MemoryBudget:
        """Return a budget without a limit."""
        return cls(None)

    @property
    def left_bytes(self) -> int | None:
        """Bytes that could be reserved now; None without a limit."""
        if self.limit_bytes is None:
            return None
        with self._lock:
            return max(self.limit_bytes - _unreclaimable_bytes() - self._promised_bytes, 0)

    def require(self, num_bytes: int, purpose: str) -> None:
        """Raise unless `num_bytes` more fit, for memory that is allocated and filled at once.

        Args:
            num_bytes: Bytes about to be taken.
            purpose: Purpose of the memory, as in "reading layer 7"; begins the error's sentence.

        Raises:
            MemoryBudgetError: The bytes do not fit.
        """
        with self._lock:
            self._verify(num_bytes, purpose)

    def reserve(self, num_bytes: int, purpose: str) -> Reservation:
        """Reserve `num_bytes` for memory that is about to be filled.

        Returns:
            The reservation, which ends by `release`, or with its `with` block.

        Raises:
            MemoryBudgetError: The bytes do not fit.
        """
        with self._lock:
            self._verify(num_bytes, purpose)
            self._promised_bytes += num_bytes
        return Reservation(num_bytes, take_back=self._take_back)

    def _verify(self, num_bytes: int, purpose: str) -> None:
        if num_bytes < 0:
            raise ValueError(f"{purpose}: {num_bytes} bytes cannot be reserved")
        left_bytes = self.left_bytes
        if left_bytes is None or num_bytes <= left_bytes:
            return
        # Freed memory may still count: garbage, and pages that the allocator keeps.
        give_back_freed_memory()
        in_use_bytes = _unreclaimable_bytes()
        assert self.limit_bytes is not None, "there is a limit here"
        if in_use_bytes + self._promised_bytes + num_bytes > self.limit_bytes:
            raise MemoryBudgetError(
                purpose,
                needed_bytes=num_bytes,
                in_use_bytes=in_use_bytes,
                promised_bytes=self._promised_bytes,
                limit_bytes=self.limit_bytes,
            )

    def _take_back(self, num_bytes: int) -> None:
        with self._lock:
            self._promised_bytes -= num_bytes


class Reservation:
    """Memory that is reserved and not filled yet; `MemoryBudget.reserve` makes it."""

    def __init__(self, num_bytes: int, *, take_back: Callable[[int], None]) -> None:
        self._left_bytes = num_bytes
        self._take_back = take_back
        self._lock = threading.Lock()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def touched(self, num_bytes: int) -> None:
        """Give back `num_bytes` that are filled: readings show them from now on."""
        with self._lock:
            done = min(num_bytes, self._left_bytes)
            self._left_bytes -= done
        self._take_back(done)

    def release(self) -> None:
        """End the reservation."""
        self.touched(self._left_bytes)


def _unreclaimable_bytes() -> int:
    usage = MemoryUsage.on_host()
    return usage.anonymous_bytes + usage.swapped_bytes


def give_back_freed_memory() -> None:
    """Collect garbage, and return freed pages to the system."""
    gc.collect()
    give_back_freed_pages()


def give_back_freed_pages() -> None:
    """Return freed pages, which the allocator keeps, to the system; mostly in less than a millisecond."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        # Only glibc has malloc_trim.
        if trim is not None:
            trim(0)


def _round_up(num_bytes: int) -> str:
    """Round up to one decimal, in the form an option takes: `12.4GB`."""
    step = max(1000 ** ((len(str(num_bytes)) - 1) // 3) // 10, 1)
    return word_size(-(-num_bytes // step) * step).replace(" ", "")

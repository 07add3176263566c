"""A budget for this process's memory, the memory that it can still take, and freed memory given back to the system.

Budgets count anonymous memory: allocated and written to, swapped pages included. Pages of mapped files do not count,
because the system drops them and reads them again as it likes. Nor does shared memory. Systems other than Linux do not
tell these apart: there all resident memory counts.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from minimax_tools.errors import CannotRunError
from minimax_tools.machine.cgroup import cgroup_headroom_bytes
from minimax_tools.machine.memory_usage import MemoryUsage
from minimax_tools.machine.size import format_size

# Share of the free memory to plan with. The rest is for memory that cannot be computed from shapes.
_PLANNED_SHARE = 0.9


class MemoryBudgetError(CannotRunError):
    """A step that would break the memory budget; nothing was allocated for it yet.

    Args:
        purpose: Purpose of the memory, as in "reading layer 7".
        in_use_bytes: Anonymous memory of the process now, swapped pages included.
        promised_bytes: Bytes that are reserved and not filled yet.
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
        promised = f", {format_size(promised_bytes)} reserved and not filled yet" if promised_bytes else ""
        super().__init__(
            f"{purpose} would break the memory budget",
            expected=f"at most {format_size(limit_bytes)}",
            found=(
                f"{format_size(in_use_bytes)} in use{promised} and {format_size(needed_bytes)} more needed: "
                f"{format_size(total_bytes - limit_bytes)} too much"
            ),
            next_step=(
                f"Allow {_round_size_up(total_bytes)} or more, or ask for less at a time: "
                "no prefetch, fewer or shorter prompts."
            ),
        )


def available_bytes(*, root: Path = Path("/")) -> int:
    """Return the bytes that this process can still take without swapping, within the machine and its cgroup.

    `root` is the folder that holds `proc` and `sys`; tests give another one.
    """
    available = psutil.virtual_memory().available
    headroom = cgroup_headroom_bytes(root=root)
    return available if headroom is None else min(available, headroom)


class MemoryBudget:
    """A limit on this process's anonymous memory, which is checked before memory is taken.

    Allocated memory shows in no reading until it is written to. So memory that is filled later, or by several threads,
    must be reserved. A reservation counts until it is filled or released:

        with budget.reserve(layer_bytes, "reading layer 7") as reservation:
            storage = [torch.empty(...), ...]
            for tensor in storage:
                fill(tensor)
                reservation.touched(tensor.nbytes)

    Memory that is reused needs no check: it is resident already. Any thread may call.

    Args:
        limit_bytes: Limit on all anonymous memory of the process, imported modules and swapped pages included; None
            for no limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"a memory budget must be positive, not {limit_bytes}")
        self.limit_bytes = limit_bytes
        self._promised_bytes = 0
        # Reentrant: collecting garbage may close a generator whose `with` block then releases its reservation.
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

        The error's text begins with `purpose`, such as "reading layer 7".

        Raises:
            MemoryBudgetError: The bytes do not fit.
        """
        with self._lock:
            self._verify(num_bytes, purpose)

    def reserve(self, num_bytes: int, purpose: str) -> Reservation:
        """Reserve `num_bytes` for memory that is about to be filled.

        The reservation ends by `release`, or with its `with` block.

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
        # Garbage, and freed pages that the allocator keeps, still count as in use: give them back, then look again.
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
            # Never more than was reserved: the rest of the budget belongs to others.
            filled_bytes = min(num_bytes, self._left_bytes)
            self._left_bytes -= filled_bytes
        self._take_back(filled_bytes)

    def release(self) -> None:
        """End the reservation."""
        self.touched(self._left_bytes)


def _unreclaimable_bytes() -> int:
    """Return the bytes that stay in use until this process frees them, in memory or swapped out."""
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


def _round_size_up(num_bytes: int) -> str:
    """Return a size as an option takes it, rounded up to one decimal of its unit: `12.4GB`."""
    unit_bytes = 1000 ** ((len(str(num_bytes)) - 1) // 3)
    step_bytes = max(unit_bytes // 10, 1)
    # Division rounded up.
    num_steps = -(-num_bytes // step_bytes)
    return format_size(num_steps * step_bytes).replace(" ", "")


def free_bytes(budget: MemoryBudget) -> int:
    """Return the memory to plan with: what the budget leaves; without a limit, a share of the machine's free memory."""
    left_bytes = budget.left_bytes
    return int(available_bytes() * _PLANNED_SHARE) if left_bytes is None else left_bytes

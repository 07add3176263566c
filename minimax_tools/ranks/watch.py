"""Watch: a thread that notices a dead rank while this rank computes.

Every rank keeps its status in the store: its state, and a number that grows with every sign of life.

| event | how the other ranks notice |
|---|---|
| a rank fails | it sets its state to FAILED before it ends |
| a rank of this machine is killed | its process is gone |
| a rank of another machine is killed | no sign of life for 40 s |
| the machine of the store dies, or is cut off | the store does not answer |

Process: a rank's process, as the other ranks see it.

BackgroundCall: a call in a thread of its own, so that the caller may stop waiting for it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process."""

    pid: int  # process id
    place: str  # machine, boot and pid namespace. Only processes of the same place see each other's ids.

    @classmethod
    def current(cls) -> Process:
        """Describe the calling process."""
        return cls(pid=os.getpid(), place=_place())

    @property
    def is_gone(self) -> bool:
        """True if the process has ended. Always False for a process of another place, which cannot be seen."""
        return self.place == _place() and not _is_alive(self.pid)


def _place() -> str:
    # Two machines may have the same name, and namespaces of two machines the same number: so name all three.
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    boot_id = boot.read_text(encoding="utf-8").strip() if boot.exists() else ""
    number = namespace.stat().st_ino if namespace.exists() else 0
    return f"{socket.gethostname()} {boot_id} {number}"


def read_state(pid: int) -> str | None:
    """Return a process's state as the kernel names it, such as R, S, T (stopped) or Z; None if it cannot be seen."""
    try:
        # The state stands behind the program's name, which is in parentheses and may hold spaces.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return None


def _is_alive(pid: int) -> bool:
    try:
        # Signal 0 does nothing but fail if the process is gone.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # Another user's process.
        return True
    # A zombie has ended, though its parent has not yet asked for its exit code. Without /proc nothing tells.
    return read_state(pid) != "Z"


class BackgroundCall:
    """A call that runs in its own thread from now on. If it never returns, its thread ends with the process.

    Attributes:
        result: The call's return value; None while it runs.
        error: The exception that ended it; None while it runs, and after success.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.result: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="background call", daemon=True)
        self._thread.start()

    def is_over(self, patience_s: float) -> bool:
        """Wait for the call, at most `patience_s` seconds, and return True if it has ended."""
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error


# States of a rank. One that FAILED reported why; one that is DONE is not needed by the others any more.
ALIVE, FAILED, DONE = "alive", "failed", "done"

# Seconds between two rounds of the watch.
_INTERVAL_S = 0.5
# Rounds without a sign of life after which a rank counts as dead. The thread gives signs of life while its rank reads
# or computes, unless other code holds Python's lock for so long. Rounds, not seconds, so that no rank is late after a
# suspended machine wakes.
_SILENT_ROUNDS = 80
SILENT_S = _SILENT_ROUNDS * _INTERVAL_S


def status_key(rank: int) -> str:
    """Return the key of a rank's status in the store; the handshake of the ranks gives it its first value."""
    return f"status/{rank}"


class Watch:
    """A thread that gives signs of life for this rank and looks for those of the others.

    Args:
        store: Connection to the run's store for the watch alone; it holds a status of every rank.
        rank: Number of this rank.
        processes: Processes of the ranks, in rank order.
        on_loss: Function to call once, from the watch's thread, when the first rank or the store is lost.
    """

    def __init__(
        self, store: Any, rank: int, processes: Sequence[Process], *, on_loss: Callable[[], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._processes = tuple(processes)
        self._on_loss = on_loss
        self._num_rounds = 0
        self._state = ALIVE
        # The last status of every other rank, and the round in which it was first seen.
        self._statuses: dict[int, tuple[str, int]] = {}
        self._lost: dict[int, str] = {}
        self._store_fault: str | None = None
        self._on_look: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Once this returns, the watch calls no function any more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def lost(self) -> Mapping[int, str]:
        """The dead ranks, each with the reason; the reason is empty if the rank itself reported it."""
        return dict(self._lost)

    @property
    def store_fault(self) -> str | None:
        """The store's fault in words; None while it answers."""
        return self._store_fault

    @property
    def has_loss(self) -> bool:
        """True if a rank died, or the store is out of reach."""
        return bool(self._lost) or self._store_fault is not None

    def set_state(self, state: str) -> None:
        """Write this rank's state to the store, and wait for the store's answer."""
        self._state = state
        with self._lock:
            self._give_sign()

    def is_done(self, rank: int) -> bool:
        """Return True if a rank was done at the last look."""
        return self._statuses.get(rank, ("", 0))[0].startswith(DONE)

    def on_look(self, call: Callable[[], None] | None) -> None:
        """Call a function at every look from now on, instead of the one given before.

        When this returns, the function given before is not running any more, unless the store hangs.
        """
        self._on_look = call
        # A look holds the lock, so taking it waits for the look in progress.
        if self._lock.acquire(timeout=4 * _INTERVAL_S):
            self._lock.release()

    def look(self) -> None:
        """Look once; wait for the store at most as long as a rank may be silent."""
        call = BackgroundCall(self._look)
        for _ in range(_SILENT_ROUNDS):
            if call.is_over(_INTERVAL_S):
                break
            if self._ended.is_set():
                return
        else:
            # No `break`: the call is not over.
            self._store_fault = f"it did not answer for {SILENT_S:.0f} s"
        if call.error is not None:
            # An error of torch: the process that serves the store has ended.
            text = str(call.error) or type(call.error).__name__
            self._store_fault = text.splitlines()[0]

    def _run(self) -> None:
        has_called = False
        while not self._ended.wait(_INTERVAL_S):
            self._num_rounds += 1
            if self._store_fault is None:
                self.look()
            if self.has_loss and not has_called:
                has_called = True
                self._on_loss()

    def _look(self) -> None:
        with self._lock:
            self._give_sign()
            others = [rank for rank in range(len(self._processes)) if rank != self._rank]
            statuses = self._store.multi_get([status_key(rank) for rank in others])
            for rank, status in zip(others, statuses, strict=True):
                reason = self._find_death(rank, status.decode())
                if reason is not None:
                    # The first reason stays.
                    self._lost.setdefault(rank, reason)
            if self._on_look is not None:
                self._call_on_look(self._on_look)

    def _give_sign(self) -> None:
        self._store.set(status_key(self._rank), f"{self._state} {self._num_rounds}")

    def _find_death(self, rank: int, status: str) -> str | None:
        """Return the reason of a rank's death, empty if the rank reported it; None if it lives or is done."""
        last_status, round_seen = self._statuses.get(rank, ("", 0))
        if status != last_status:
            round_seen = self._num_rounds
            self._statuses[rank] = (status, round_seen)
        if status.startswith(DONE):
            return None
        if status.startswith(FAILED):
            return ""
        if self._processes[rank].is_gone:
            return "its process is gone: killed, or out of memory"
        if self._num_rounds - round_seen > _SILENT_ROUNDS:
            return f"it gave no sign of life for {SILENT_S:.0f} s"
        return None

    def _call_on_look(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            # Only the display ends. The watch must go on.
            logger.warning("Progress is not shown any more: %s.", error)
            self._on_look = None

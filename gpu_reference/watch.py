"""Watch: notices that another rank of the run died, whatever this one is doing meanwhile.

A rank that fails says so in the store before it ends. One that was killed cannot: on the same machine its process is
gone, from another it gives no sign of life any more.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_INTERVAL_S = 0.5
# A rank that reads or computes still beats; only one that holds Python's lock for so long would be taken for dead. Told
# in rounds of this rank's own: where a whole machine was stopped for a while, nobody is late.
_SILENT_ROUNDS = 80


class Watch:
    """Beats for this rank and listens for the others, in a thread of its own.

    Args:
        store: torch.distributed's, a connection of its own.
        rank: This one.
        num_ranks: How many there are.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._num_rounds = 0
        self._beats: dict[int, tuple[bytes, int]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lost: dict[int, str] = {}
        self._on_look: Callable[[], None] | None = None
        store.set(f"who/{rank}", json.dumps({"pid": os.getpid(), "place": _place()}))
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; the thread is gone afterwards."""
        self._ended.set()
        self._thread.join()

    @property
    def lost(self) -> dict[int, str]:
        """The ranks that died, and what is known of it."""
        return dict(self._lost)

    def on_look(self, call: Callable[[], None] | None) -> None:
        """Call something whenever the thread looks round; once this returns, what was called before is over."""
        with self._lock:
            self._on_look = call

    def look(self) -> None:
        """Look now, from any thread."""
        with self._lock:
            try:
                self._look()
                if self._on_look is not None:
                    self._on_look()
            except RuntimeError as error:
                # torch's DistError: whoever keeps the store is gone, and that is rank 0's machine.
                self._lost.setdefault(0, f"its store is gone ({str(error).splitlines()[0]})")

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._num_rounds += 1
            self.look()

    def _look(self) -> None:
        self._store.set(f"beat/{self._rank}", str(time.monotonic()))
        for other in self._others:
            if self._has(f"done/{other}"):
                continue
            if self._has(f"failed/{other}"):
                self._lost.setdefault(other, "")
            elif (reason := self._find_reason(other)) is not None:
                self._lost.setdefault(other, reason)

    def _find_reason(self, other: int) -> str | None:
        if self._has(f"who/{other}"):
            who = json.loads(self._store.get(f"who/{other}"))
            if who["place"] == _place() and not _is_alive(who["pid"]):
                return "its process is gone: killed, or out of memory"
        if not self._has(f"beat/{other}"):
            # Not here yet: a rank may start minutes after another, and torchrun sees to it that it does.
            return None
        beat = self._store.get(f"beat/{other}")
        last, since = self._beats.setdefault(other, (beat, self._num_rounds))
        if beat != last:
            self._beats[other] = (beat, self._num_rounds)
        elif self._num_rounds - since > _SILENT_ROUNDS:
            return f"it gave no sign of life for {_SILENT_ROUNDS * _INTERVAL_S:.0f} s"
        return None

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))


def _place() -> str:
    """What processes share that see each other's ids."""
    namespace = Path("/proc/self/ns/pid")
    number = namespace.stat().st_ino if namespace.exists() else 0
    return f"{socket.gethostname()} {number}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:
        # Somebody else's, or no such file system here.
        return True
    return state != "Z"

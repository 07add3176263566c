"""Watch: notices that another rank of the run died, whatever this one is doing meanwhile.

Every rank keeps one value in the store, its status: a state and the number of its last sign of life. A rank that fails
says so there before it ends. One that was killed cannot: on the same machine its process is gone, from another it
gives no sign of life any more. A store that does not answer is a loss too: its machine died, or is cut off.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_reference.ranks.background_call import Errand
from gpu_reference.ranks.process import Process

logger = logging.getLogger(__name__)

ALIVE = "alive"
FAILED = "failed"  # It said why.
DONE = "done"  # Nobody needs it any more.

_INTERVAL_S = 0.5
# A rank that reads or computes still gives signs of life; only one that holds Python's lock for so long would be taken
# for dead. Told in rounds of this rank's own: where a whole machine was stopped for a while, nobody is late.
_SILENT_ROUNDS = 80
SILENT_S = _SILENT_ROUNDS * _INTERVAL_S


def status_key(rank: int) -> str:
    """Where a rank's status stands in the store; there from before its watch begins."""
    return f"status/{rank}"


class Watch:
    """Gives signs of life for this rank and looks for those of the others, in threads of its own.

    Args:
        store: torch.distributed's, a connection of its own; it has a status of every rank.
        rank: This one.
        processes: Those of all ranks, in order.
        on_loss: Called once, from the watch's thread, when the first loss shows.
    """

    def __init__(
        self, store: Any, rank: int, processes: Sequence[Process], *, on_loss: Callable[[], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._processes = tuple(processes)
        self._tell_loss = on_loss
        self._num_rounds = 0
        self._state = ALIVE
        self._statuses: dict[int, tuple[str, int]] = {}
        self._lost: dict[int, str] = {}
        self._store_fault: str | None = None
        self._on_look: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; nothing is called any more once this returns."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def lost(self) -> Mapping[int, str]:
        """The ranks that died, and what is known of it; nothing of one that said so itself."""
        return dict(self._lost)

    @property
    def store_fault(self) -> str | None:
        """What is wrong with the store; None while it answers."""
        return self._store_fault

    @property
    def has_loss(self) -> bool:
        """Whether a rank died, or the store."""
        return bool(self._lost) or self._store_fault is not None

    def tell(self, state: str) -> None:
        """Put this rank's state into the store; waits for it to answer."""
        self._state = state
        with self._lock:
            self._give_sign()

    def is_done(self, rank: int) -> bool:
        """Whether a rank was done when the watch looked last."""
        return self._statuses.get(rank, ("", 0))[0].startswith(DONE)

    def on_look(self, call: Callable[[], None] | None) -> None:
        """Call something whenever the watch looks; what was called before is over then, unless the store hangs."""
        self._on_look = call
        if self._lock.acquire(timeout=4 * _INTERVAL_S):
            self._lock.release()

    def look(self) -> None:
        """Look now; waits for the store as long as a rank may be silent."""
        errand = Errand(self._look)
        for _ in range(_SILENT_ROUNDS):
            if errand.is_over(_INTERVAL_S):
                break
            if self._ended.is_set():
                return
        else:
            self._store_fault = f"it did not answer for {SILENT_S:.0f} s"
        if errand.error is not None:
            # torch's DistError: whoever keeps the store is gone.
            text = str(errand.error) or type(errand.error).__name__
            self._store_fault = text.splitlines()[0]

    def _run(self) -> None:
        has_told = False
        while not self._ended.wait(_INTERVAL_S):
            self._num_rounds += 1
            if self._store_fault is None:
                self.look()
            if self.has_loss and not has_told:
                has_told = True
                self._tell_loss()

    def _look(self) -> None:
        with self._lock:
            self._give_sign()
            others = [rank for rank in range(len(self._processes)) if rank != self._rank]
            for rank, status in zip(
                others, self._store.multi_get([status_key(rank) for rank in others]), strict=True
            ):
                reason = self._judge(rank, status.decode())
                if reason is not None:
                    self._lost.setdefault(rank, reason)
            if self._on_look is not None:
                self._call_on_look(self._on_look)

    def _give_sign(self) -> None:
        self._store.set(status_key(self._rank), f"{self._state} {self._num_rounds}")

    def _judge(self, rank: int, status: str) -> str | None:
        """What is known of a rank's death; None where it lives or is done."""
        last, since = self._statuses.setdefault(rank, (status, self._num_rounds))
        if status != last:
            since = self._num_rounds
            self._statuses[rank] = (status, since)
        if status.startswith(DONE):
            return None
        if status.startswith(FAILED):
            return ""
        if self._processes[rank].is_gone:
            return "its process is gone: killed, or out of memory"
        if self._num_rounds - since > _SILENT_ROUNDS:
            return f"it gave no sign of life for {SILENT_S:.0f} s"
        return None

    def _call_on_look(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            # Of a display alone; the signs of life go on.
            logger.warning("Progress is not shown any more: %s.", error)
            self._on_look = None

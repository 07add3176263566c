"""RankGroup: the ranks of a run, as one of them sees them.

| task | calls |
|---|---|
| publish a value to all ranks, wait for one | `publish(key, value)`, `wait_for(key)` |
| pass a tensor to another rank | `send(tensor, to=…)`, `receive(shape, …)` |

When a rank dies, the watch of every other rank notices (see `watch`): at once on the same machine, within 41 s from
another one. The watch interrupts the main thread by a signal, in a wait, a download or a forward pass. Only code
outside Python is waited for: at the longest one operator of torch, or the reading or writing of one tensor file.
One rank then names the dead one, and all end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from minimax_tools.errors import BackendError, CannotRunError, Mm2Error, UsageError
from minimax_tools.machine.native_output import native_output_dropped
from minimax_tools.ranks.background_call import BackgroundCall
from minimax_tools.ranks.failure import (
    RESUME,
    STORE_LOST,
    RankFailedError,
    RankLostError,
    ReportedElsewhereError,
)
from minimax_tools.ranks.handshake import ARRIVAL_S, meet
from minimax_tools.ranks.interrupt import InterruptedRunError, Interrupter
from minimax_tools.ranks.links import Links, identify_gpu
from minimax_tools.ranks.rank_place import RankPlace
from minimax_tools.ranks.store import LocalStore, connect_store, store_lost
from minimax_tools.ranks.watch import DONE, FAILED, SILENT_S, Watch

_POLL_S = 0.02
# How long the ranks, all present, may take to connect: to the store, and to the process group.
_CONNECT_S = 120.0
# How long to look for the dead rank, once a connection is lost.
_EXPLAIN_S = SILENT_S + 5.0
_EXPLAIN_STOP_S = 5.0
# How long the store may take where no result depends on its answer.
_FAREWELL_S = 5.0


class RankGroup:
    """The ranks of a run, as one of them sees them; made by `open_ranks`.

    Every call that waits for another rank raises RankLostError, or ReportedElsewhereError, where that rank has died.

    Attributes:
        place: This rank's.
        nonce: The name of this attempt.
    """

    def __init__(
        self,
        place: RankPlace,
        store: Any,
        *,
        nonce: str = "",
        watch: Watch | None = None,
        interrupter: Interrupter | None = None,
        link_store: Any = None,
    ) -> None:
        self.place = place
        self.nonce = nonce
        self._store = store
        self._watch = watch
        self._interrupter = interrupter
        self._is_settled = False
        self._link_store = link_store
        self._links: Links | None = None
        self._nodes: tuple[str, ...] = ()
        self._sent: list[BackgroundCall] = []
        self._on_look: Callable[[], None] | None = None

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.place.rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.place.num_ranks

    def name(self, rank: int) -> str:
        """Name a rank, with its node where it has one."""
        return f"rank {rank} (node {self._nodes[rank]})" if self._nodes else f"rank {rank}"

    def assign(self, nodes: Sequence[str]) -> None:
        """Give each rank a node of the plan, in rank order.

        Raises:
            UsageError: The number of ranks is not that of the nodes.
        """
        if self.num_ranks != len(nodes):
            raise UsageError(
                f"the plan has {_count(len(nodes), 'slice')} for {_count(self.num_ranks, 'rank')}",
                expected=f"a rank for each of {', '.join(nodes)}",
                next_step=f"Start it as: torchrun --nproc-per-node {len(nodes)} -m gpu_reference extract-all "
                "--plan … (on several machines, with --nnodes, --node-rank and --master-addr too).",
            )
        self._nodes = tuple(nodes)

    def join(self, device: torch.device) -> None:
        """Open the process group: nccl where every rank has its own GPU, else gloo.

        Args:
            device: The device that this rank computes on.

        Raises:
            RankLostError: A rank died, or cannot be reached.
        """
        if self.num_ranks == 1:
            return
        self.publish(f"device/{self.rank}", identify_gpu(device))
        devices = [self.wait_for(f"device/{rank}") for rank in range(self.num_ranks)]
        is_direct = None not in devices and len(set(devices)) == self.num_ranks
        links = self._links = Links(self.place, device, is_direct=is_direct)
        failure = (
            "the ranks do not find each other: name the network interface that all machines share "
            "(GLOO_SOCKET_IFNAME, with GPUs NCCL_SOCKET_IFNAME)"
        )
        with native_output_dropped():
            call = BackgroundCall(lambda: links.connect(self._link_store))
            self._wait(call, failure, limit_s=_CONNECT_S)

    def publish(self, key: str, value: Any) -> None:
        """Publish a JSON value to all ranks."""
        text = json.dumps(value)
        self._guard(lambda: self._store.set(f"said/{key}", text))
        if self._watch is None and self._on_look is not None:
            self._on_look()

    def is_published(self, key: str) -> bool:
        """Return True if a rank has published a value under this key."""
        return bool(self._guard(lambda: self._store.check([f"said/{key}"])))

    def wait_for(self, key: str) -> Any:
        """Wait for the value that a rank publishes under this key, and return it."""
        while not self.is_published(key):
            self.check()
            time.sleep(_POLL_S)
        return json.loads(self._guard(lambda: self._store.get(f"said/{key}")))

    def send(self, tensor: torch.Tensor, *, to: int) -> None:
        """Send a tensor without waiting for its receiver; do not change the tensor any more."""
        assert self._links is not None, "the ranks joined"
        self._sent.append(self._links.send(tensor, to=to))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, *, source: int) -> torch.Tensor:
        """Wait for a tensor of this shape and dtype from a rank; return it on this rank's device."""
        assert self._links is not None, "the ranks joined"
        call = self._links.receive(shape, dtype, source=source)
        tensor: torch.Tensor = self._wait(call, f"{self.name(source)} cannot be reached")
        return tensor

    def flush(self) -> None:
        """Wait until every tensor sent has been received."""
        for call in self._sent:
            self._wait(call, f"{self.name(self.rank + 1)} cannot be reached")

    def settle(self) -> None:
        """Need no other rank from here on: a loss neither ends a wait nor interrupts this rank."""
        self._is_settled = True
        if self._interrupter is not None:
            self._interrupter.disarm()

    def check(self) -> None:
        """Raise if a rank died that is still needed: ReportedElsewhereError where it, or another rank, reported it."""
        if self._watch is not None and self._watch.has_loss and not self._is_settled:
            raise self._loss(self._watch)

    def leave(self) -> None:
        """Say that this rank is done, and wait until rank 0 is, which ends the run.

        No rank needs one that is done. Only rank 0, which may need them still, judges the deaths of the others.
        """
        self.settle()
        watch = self._watch
        if watch is None:
            return
        BackgroundCall(lambda: watch.tell(DONE)).is_over(_FAREWELL_S)
        while self.rank > 0 and not watch.is_done(0):
            if 0 in watch.lost or watch.store_fault is not None:
                raise self._loss(watch)
            time.sleep(_POLL_S)
        watch.stop()
        if self._links is not None:
            BackgroundCall(self._links.close).is_over(_FAREWELL_S)

    def on_look(self, call: Callable[[], None] | None) -> None:
        """Call a function twice a second from another thread; for a single rank, at every `publish`."""
        self._on_look = call
        if self._watch is not None:
            self._watch.on_look(call)

    def fail(self, error: BaseException) -> Mm2Error:
        """Tell the others that this rank ends, and return the error to end with."""
        told = self._explain_own(error)
        watch = self._watch
        if watch is not None:
            BackgroundCall(lambda: watch.tell(FAILED)).is_over(_FAREWELL_S)
            # A thread that is within the store when Python ends takes the process down with SIGABRT.
            watch.stop()
        return told

    def _explain_own(self, error: BaseException) -> Mm2Error:
        if isinstance(error, InterruptedRunError):
            return self._explain(_EXPLAIN_STOP_S, f"{self.name(self.rank)} was told to stop")
        if isinstance(error, (RankLostError, ReportedElsewhereError)):
            return error
        text, exit_code = str(error), getattr(error, "exit_code", CannotRunError.exit_code)
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted"
        elif not isinstance(error, Mm2Error):
            text = f"unexpected {type(error).__name__}: {text}" if str(error) else type(error).__name__
        if not self._is_first_to_report(text):
            return ReportedElsewhereError(exit_code)
        if isinstance(error, UsageError):
            return error
        return RankFailedError(self.name(self.rank), text)

    def _guard(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call to the store, which may not answer any more."""
        return call() if self._watch is None else self._wait(BackgroundCall(call), STORE_LOST)

    def _wait(self, call: BackgroundCall, failure: str, *, limit_s: float | None = None) -> Any:
        """Wait for a call, and look for dead ranks meanwhile.

        Args:
            call: The call, whose result is returned.
            failure: The error's text where the call ends by an error of torch's, or not in time.
            limit_s: Longest wait, in seconds.
        """
        begun_s = time.monotonic()
        while not call.is_over(_POLL_S):
            self.check()
            if limit_s is not None and time.monotonic() - begun_s > limit_s:
                raise RankLostError(failure, found=f"no connection after {limit_s:.0f} s")
        if call.error is None:
            return call.result
        if not isinstance(call.error, RuntimeError):
            raise call.error
        # The connection broke: which rank's fault that is shows a moment later.
        text = str(call.error) or type(call.error).__name__
        raise self._explain(_EXPLAIN_S, f"{failure}: {text.splitlines()[0]}") from call.error

    def _explain(self, patience_s: float, otherwise: str) -> Mm2Error:
        """Name the dead rank as soon as it is known. Where it stays unknown, say `otherwise`."""
        deadline = time.monotonic() + patience_s
        while self._watch is not None and time.monotonic() < deadline:
            if self._watch.has_loss:
                return self._loss(self._watch)
            time.sleep(_POLL_S)
        if self._is_first_to_report("lost"):
            return RankLostError(otherwise, next_step=RESUME)
        return ReportedElsewhereError(CannotRunError.exit_code)

    def _loss(self, watch: Watch) -> Mm2Error:
        # A rank that failed reported it itself, and one survivor is enough to report a dead one.
        lost = watch.lost
        silent = {rank: reason for rank, reason in lost.items() if reason}
        if not lost:
            # Without the store no rank knows what others reported: each reports.
            return RankLostError(f"{STORE_LOST}: {watch.store_fault}", next_step=RESUME)
        if len(silent) < len(lost) or not self._is_first_to_report("lost"):
            return ReportedElsewhereError(CannotRunError.exit_code)
        rank, reason = min(silent.items())
        return RankFailedError(self.name(rank), reason, next_step=RESUME)

    def _is_first_to_report(self, text: str) -> bool:
        """Claim a report for this rank; it stays this rank's, however often it asks.

        An interrupt may come in the middle, and the thread that shows progress may ask first.
        """
        key = f"told/{hashlib.sha256(text.encode()).hexdigest()}"
        own = str(self.rank)
        call = BackgroundCall(lambda: self._store.compare_set(key, "", own).decode())
        # Without the store each rank reports.
        return not call.is_over(_FAREWELL_S) or call.error is not None or call.result == own


@contextlib.contextmanager
def open_ranks(place: RankPlace) -> Iterator[RankGroup]:
    """Meet the other ranks. An error in the block ends them too, and one of them reports it.

    To be called in the main thread, which is interrupted when a rank dies.

    Raises:
        ReportedElsewhereError: An error ended the block that another rank reported.
        CannotRunError: The ranks did not meet.
    """
    if place.num_ranks == 1:
        yield RankGroup(place, LocalStore())
        return
    with Interrupter() as interrupter:
        ranks = _meet(place, interrupter)
        try:
            try:
                yield ranks
            finally:
                interrupter.disarm()
        except (Exception, KeyboardInterrupt, InterruptedRunError) as error:
            raise ranks.fail(error) from error


def _meet(place: RankPlace, interrupter: Interrupter) -> RankGroup:
    if not torch.distributed.is_available():
        raise BackendError("several ranks need torch.distributed", found="a torch that was built without it")
    from torch._C._distributed_c10d import PrefixStore

    try:
        store = connect_store(timedelta(seconds=_CONNECT_S))
        call = BackgroundCall(lambda: meet(store, place))
        # A little longer than `meet` itself waits: where the store hangs, it does not see the time.
        if not call.is_over(ARRIVAL_S + _CONNECT_S):
            raise CannotRunError(STORE_LOST)
    except InterruptedRunError:
        raise CannotRunError(f"rank {place.rank} was told to stop before all ranks were there") from None
    if call.error is not None:
        raise store_lost(call.error) if isinstance(call.error, RuntimeError) else call.error
    meeting = call.result

    def connect(prefix: str) -> Any:
        return PrefixStore(f"{meeting.attempt}{prefix}", store.clone())

    watch = Watch(connect(""), place.rank, meeting.processes, on_loss=interrupter.interrupt)
    watch.start()
    return RankGroup(
        place,
        connect(""),
        nonce=meeting.attempt,
        watch=watch,
        interrupter=interrupter,
        link_store=connect("/links"),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

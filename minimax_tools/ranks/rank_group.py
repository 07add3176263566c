"""RankGroup: the ranks of a run, as one of them sees them.

| task | calls |
|---|---|
| publish a value to all ranks, wait for one | `publish(key, value)`, `wait_for(key)` |
| pass a tensor to another rank | `send(tensor, to=…)`, `receive(shape, …)` |

When a rank dies, the watch of every other rank notices (see `watch`): at once on the same machine, within 41 s on
another machine. The watch interrupts the main thread by a signal, in a wait, a download or a forward pass. The
interrupt waits for code outside Python only: for one operator of torch, or for the reading or writing of one tensor
file. Then one rank reports the dead rank (see `failure_report`), and all end.

An exception in the main thread, caused by another thread or another process.

FailureReport: which rank reports a failure, and with which error each rank ends.

Of the ranks that fail with the same text, one reports it. The others end with ReportedElsewhereError, which prints
nothing new; so do the ranks that only lost another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from minimax_tools.errors import BackendError, CannotRunError, Mm2Error, UsageError, format_count
from minimax_tools.machine.native_output import native_output_dropped
from minimax_tools.ranks.failure import (
    RESUME,
    STORE_LOST,
    LocalStore,
    RankFailedError,
    RankLostError,
    ReportedElsewhereError,
    connect_store,
    store_lost_error,
)
from minimax_tools.ranks.handshake import ARRIVAL_S, meet
from minimax_tools.ranks.links import Links, identify_gpu
from minimax_tools.ranks.rank_place import RankPlace
from minimax_tools.ranks.watch import DONE, FAILED, SILENT_S, BackgroundCall, Watch


class InterruptedRunError(BaseException):
    """The order to stop, from this rank's watch or from torchrun, which ends all ranks when one has died.

    It is a BaseException, so that no `except Exception` in other code swallows it.
    """


class Interrupter:
    """A `with` block in which the first SIGTERM raises `InterruptedRunError` in the main thread, unless disarmed.

    SIGTERM comes from `interrupt`, or from torchrun. Later ones are ignored until the block ends.
    """

    def __init__(self) -> None:
        self._is_armed = True
        self._lock = threading.Lock()
        self._handler_before: Any = None

    def __enter__(self) -> Interrupter:
        self._handler_before = signal.signal(signal.SIGTERM, self._raise_once)
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()
        signal.signal(signal.SIGTERM, self._handler_before)

    def disarm(self) -> None:
        """Ignore SIGTERM from here on."""
        with self._lock:
            self._is_armed = False

    def interrupt(self) -> None:
        """Interrupt the main thread from another thread, even in a system call or a wait for a lock."""
        # The lock keeps `disarm` from returning while a signal is on its way.
        with self._lock:
            if self._is_armed:
                # A running thread has an id; `or 0` is for the type checker.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _raise_once(self, *_: object) -> None:
        if self._is_armed:
            self._is_armed = False
            raise InterruptedRunError


# Time between two looks into the store, in seconds.
_POLL_S = 0.02
# Longest wait for a connection to the store, and to the process group, in seconds. All ranks have started by then.
_CONNECT_S = 120.0
# Longest wait for the store in seconds, if no result depends on its answer.
_FAREWELL_S = 5.0


class RankGroup:
    """The ranks of a run, as one of them sees them; made by `open_ranks`.

    If another rank has died, every call that waits for it raises RankLostError, or ReportedElsewhereError.

    A single rank has neither watch nor interrupter nor link store.

    Attributes:
        place: Number of this rank, and number of ranks.
        nonce: Name of this attempt, which no other run shares.
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
        self._report = FailureReport(place.rank, name=self.name, store=store, watch=watch)
        self._is_settled = False
        # Connection to the store for the process group (`Links`) alone.
        self._link_store = link_store
        self._links: Links | None = None
        self._nodes: tuple[str, ...] = ()  # the plan's node of each rank; empty until `assign`
        self._sent: list[BackgroundCall] = []
        self._on_look: Callable[[], None] | None = None

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.place.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.place.num_ranks

    def name(self, rank: int) -> str:
        """Name a rank in words, with its node if it has one."""
        return f"rank {rank} (node {self._nodes[rank]})" if self._nodes else f"rank {rank}"

    def assign(self, nodes: Sequence[str]) -> None:
        """Give each rank a node of the plan, in rank order.

        Raises:
            UsageError: The number of ranks is not that of the nodes.
        """
        if self.num_ranks != len(nodes):
            raise UsageError(
                f"the plan has {format_count(len(nodes), 'slice')} for {format_count(self.num_ranks, 'rank')}",
                expected=f"a rank for each of {', '.join(nodes)}",
                next_step=f"Start it as: torchrun --nproc-per-node {len(nodes)} -m gpu_reference extract-all "
                "--plan … (on several machines, with --nnodes, --node-rank and --master-addr too).",
            )
        self._nodes = tuple(nodes)

    def join(self, device: torch.device) -> None:
        """Open the process group for this rank's device: nccl if every rank has its own GPU, else gloo.

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
        self._ask_store(lambda: self._store.set(f"said/{key}", text))
        if self._watch is None and self._on_look is not None:
            self._on_look()

    def is_published(self, key: str) -> bool:
        """Return True if a rank has published a value under this key."""
        return bool(self._ask_store(lambda: self._store.check([f"said/{key}"])))

    def wait_for(self, key: str) -> Any:
        """Wait for the value that a rank publishes under this key, and return it."""
        while not self.is_published(key):
            self.check()
            time.sleep(_POLL_S)
        return json.loads(self._ask_store(lambda: self._store.get(f"said/{key}")))

    def send(self, tensor: torch.Tensor, *, to: int) -> None:
        """Send a tensor without waiting for its receiver; do not change it any more. One tensor at a time to a rank."""
        assert self._links is not None, "the ranks joined"
        self._sent.append(self._links.send(tensor, to=to))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, *, source: int) -> torch.Tensor:
        """Wait for a tensor of this shape and dtype from a rank; return it on this rank's device."""
        assert self._links is not None, "the ranks joined"
        call = self._links.receive(shape, dtype, source=source)
        tensor: torch.Tensor = self._wait(call, f"{self.name(source)} cannot be reached")
        return tensor

    def flush(self) -> None:
        """Wait until every tensor sent has been received. Tensors go to the next rank only."""
        for call in self._sent:
            self._wait(call, f"{self.name(self.rank + 1)} cannot be reached")

    def settle(self) -> None:
        """Need no other rank from here on: a loss neither ends a wait nor interrupts this rank."""
        self._is_settled = True
        if self._interrupter is not None:
            self._interrupter.disarm()

    def check(self) -> None:
        """Raise if a rank died that is still needed.

        Raises:
            RankLostError: A rank died, and this rank is the one to report it.
            ReportedElsewhereError: A rank died, and it or another rank reported it.
        """
        if self._watch is not None and self._watch.has_loss and not self._is_settled:
            raise self._report.of_loss(self._watch)

    def leave(self) -> None:
        """Say that this rank is done, and wait until rank 0 is done too, which ends the run.

        From here on only the death of rank 0 is an error: rank 0 finishes the capture, the other ranks have given
        their parts.
        """
        self.settle()
        watch = self._watch
        if watch is None:
            return
        BackgroundCall(lambda: watch.set_state(DONE)).is_over(_FAREWELL_S)
        while self.rank > 0 and not watch.is_done(0):
            if 0 in watch.lost or watch.store_fault is not None:
                raise self._report.of_loss(watch)
            time.sleep(_POLL_S)
        watch.stop()
        if self._links is not None:
            BackgroundCall(self._links.close).is_over(_FAREWELL_S)

    def on_look(self, call: Callable[[], None] | None) -> None:
        """Call a function at every look of the watch, twice a second from its thread; None ends the calls.

        A single rank has no watch: it calls the function at every `publish`.
        """
        self._on_look = call
        if self._watch is not None:
            self._watch.on_look(call)

    def fail(self, error: BaseException) -> Mm2Error:
        """Tell the other ranks that this rank ends, and return the error to end with."""
        final_error = self._report.of_error(error)
        watch = self._watch
        if watch is not None:
            BackgroundCall(lambda: watch.set_state(FAILED)).is_over(_FAREWELL_S)
            # A thread that is within the store when Python ends takes the process down with SIGABRT.
            watch.stop()
        return final_error

    def _ask_store(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call to the store, which may hang if its process has died."""
        return call() if self._watch is None else self._wait(BackgroundCall(call), STORE_LOST)

    def _wait(self, call: BackgroundCall, failure: str, *, limit_s: float | None = None) -> Any:
        """Wait for a call and return its result; look for dead ranks meanwhile.

        `failure` is the error's text if torch raises one in the call, or if the call takes over `limit_s` seconds.
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
        raise self._report.of_broken_connection(failure, call.error) from call.error


@contextlib.contextmanager
def open_ranks(place: RankPlace) -> Iterator[RankGroup]:
    """Meet the other ranks; the block ends with `leave`. An error in it ends them too, and one rank reports it.

    Call it in the main thread, which is interrupted when a rank dies.

    Raises:
        ReportedElsewhereError: An error ended the block, and another rank reported it.
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
        # A little longer than `meet` itself waits, because `meet` does not notice the time while the store hangs.
        if not call.is_over(ARRIVAL_S + _CONNECT_S):
            raise CannotRunError(STORE_LOST)
    except InterruptedRunError:
        raise CannotRunError(f"rank {place.rank} was told to stop before all ranks were there") from None
    if call.error is not None:
        raise store_lost_error(call.error) if isinstance(call.error, RuntimeError) else call.error
    meeting = call.result

    def connect(prefix: str) -> Any:
        """Open a new connection: one connection takes one call at a time, and a call may wait."""
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


# Time between two looks at the watch, in seconds.
_POLL_S = 0.02
# Longest search for the dead rank in seconds: after a lost connection (the watch takes a rank for dead that is silent
# for SILENT_S), and after an order to stop.
_CONNECTION_PATIENCE_S = SILENT_S + 5.0
_STOP_PATIENCE_S = 5.0
# Longest wait for the store in seconds: the rank that holds it may have gone already.
_STORE_PATIENCE_S = 5.0


class FailureReport:
    """A choice of the error with which this rank ends, whatever ended its work.

    `name` is the function that names a rank in words, `store` torch.distributed's store. `watch` is None if nothing
    watches the other ranks.
    """

    def __init__(self, rank: int, *, name: Callable[[int], str], store: Any, watch: Watch | None) -> None:
        self._rank = rank
        self._name = name
        self._store = store
        self._watch = watch

    def of_error(self, error: BaseException) -> Mm2Error:
        """Return the error to end with after `error` ended this rank's work."""
        # Told to stop by a signal: usually the launcher stops the ranks because one died. That one is named.
        if isinstance(error, InterruptedRunError):
            return self._of_dead_rank(_STOP_PATIENCE_S, f"{self._name(self._rank)} was told to stop")
        if isinstance(error, (RankLostError, ReportedElsewhereError)):
            return error
        text = str(error)
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted"
        elif not isinstance(error, Mm2Error):
            text = f"unexpected {type(error).__name__}: {text}" if text else type(error).__name__
        if not self._is_first_to_report(text):
            return ReportedElsewhereError(getattr(error, "exit_code", CannotRunError.exit_code))
        # Wrong usage keeps its own exit code.
        if isinstance(error, UsageError):
            return error
        return RankFailedError(self._name(self._rank), text)

    def of_broken_connection(self, failure: str, error: Exception) -> Mm2Error:
        """Return the error to end with after a connection broke. Which rank is to blame shows a moment later."""
        text = str(error) or type(error).__name__
        return self._of_dead_rank(_CONNECTION_PATIENCE_S, f"{failure}: {text.splitlines()[0]}")

    def of_loss(self, watch: Watch) -> Mm2Error:
        """Return the error to end with after the watch noticed a loss."""
        lost = watch.lost
        if not lost:
            # No rank is lost, so the watch noticed that the store is. Without it each rank reports.
            return RankLostError(f"{STORE_LOST}: {watch.store_fault}", next_step=RESUME)
        # `lost` maps a rank to how it died. An empty text means that the rank ended in order, after its own report.
        has_reported_itself = "" in lost.values()
        # One survivor is enough to report a dead rank: all claim the same text, "lost", whatever each of them saw.
        if has_reported_itself or not self._is_first_to_report("lost"):
            return ReportedElsewhereError(CannotRunError.exit_code)
        rank, reason = min(lost.items())
        return RankFailedError(self._name(rank), reason, next_step=RESUME)

    def _of_dead_rank(self, patience_s: float, otherwise: str) -> Mm2Error:
        """Name the dead rank as soon as it is known. If it stays unknown, return an error that says `otherwise`."""
        deadline = time.monotonic() + patience_s
        while self._watch is not None and time.monotonic() < deadline:
            if self._watch.has_loss:
                return self.of_loss(self._watch)
            time.sleep(_POLL_S)
        if self._is_first_to_report("lost"):
            return RankLostError(otherwise, next_step=RESUME)
        return ReportedElsewhereError(CannotRunError.exit_code)

    def _is_first_to_report(self, text: str) -> bool:
        """Claim the report `text` for this rank, and return True if no other rank claimed the same text before.

        The claim holds the rank's number, so a rank that asks again gets True again: an interrupt may have cut it
        short, or its thread that shows progress asked first.
        """
        key = f"told/{hashlib.sha256(text.encode()).hexdigest()}"  # a digest: the text may be long
        own_claim = str(self._rank)
        # Sets the key if it is absent, and returns what it then holds.
        call = BackgroundCall(lambda: self._store.compare_set(key, "", own_claim).decode())
        has_answer = call.is_over(_STORE_PATIENCE_S) and call.error is None
        # Without an answer of the store each rank reports.
        return not has_answer or call.result == own_claim

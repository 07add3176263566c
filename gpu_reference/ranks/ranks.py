"""RankGroup: the processes of a run that torchrun started, one for each slice of a plan, and how they talk.

| to | call |
|---|---|
| tell all ranks a value, wait for one | `say(key, value)`, `ask(key)` |
| pass hidden states on, take them | `send(tensor, to=…)`, `receive(shape, …)` |

When a rank dies, the watch of every other one notices (see `watch`), at once on the same machine and within 41 s from
another, and interrupts whatever the main thread does there, by a signal: a wait, a download, a forward pass. Only code
outside Python is not interrupted but waited for: the longest is one operator of torch, or the reading or writing of
one tensor file. One rank names the dead one, and all end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from gpu_reference.ranks.background_call import Errand
from gpu_reference.ranks.handshake import ARRIVAL_S, meet
from gpu_reference.ranks.interrupt import InterruptedRunError, Stopper
from gpu_reference.ranks.links import Links, identify_gpu
from gpu_reference.ranks.local_store import LocalStore
from gpu_reference.ranks.rank_place import RankPlace
from gpu_reference.ranks.watch import DONE, FAILED, SILENT_S, Watch
from minimax_tools.errors import BackendError, CannotRunError, Mm2Error, UsageError
from minimax_tools.machine.native_output import native_output_dropped

_POLL_S = 0.02
# How long the ranks, all there, may take to find each other: the store, and the process group.
_CONNECT_S = 120.0
# How long to look for who died, when it shows that somebody did.
_EXPLAIN_S = SILENT_S + 5.0
_EXPLAIN_STOP_S = 5.0
# How long the store may take where nothing depends on its answer any more.
_FAREWELL_S = 5.0
_RESUME = "Run the same command again: it resumes after the layers that are stored."


class ToldError(Mm2Error):
    """The run ended, and another rank said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another rank said why the run ended")
        self.exit_code = exit_code


class RankLostError(CannotRunError):
    """A rank died."""


class RankGroup:
    """The ranks of a run, as one of them sees them; made by `open_ranks`.

    Attributes:
        place: Which one this is.
        nonce: The name of this attempt.
    """

    def __init__(
        self,
        place: RankPlace,
        store: Any,
        *,
        nonce: str = "",
        watch: Watch | None = None,
        stopper: Stopper | None = None,
        link_store: Any = None,
    ) -> None:
        self.place = place
        self.nonce = nonce
        self._store = store
        self._watch = watch
        self._stopper = stopper
        self._is_settled = False
        self._link_store = link_store
        self._links: Links | None = None
        self._nodes: tuple[str, ...] = ()
        self._sent: list[Errand] = []
        self._on_look: Callable[[], None] | None = None

    @property
    def rank(self) -> int:
        """This one's number."""
        return self.place.rank

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return self.place.num_ranks

    def name(self, rank: int) -> str:
        """A rank in words."""
        return f"rank {rank} (node {self._nodes[rank]})" if self._nodes else f"rank {rank}"

    def assign(self, nodes: Sequence[str]) -> None:
        """Give each rank a node, in their order.

        Raises:
            UsageError: There are more or fewer ranks than nodes.
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
        """Open the process group: nccl where every rank has a GPU of its own, else gloo.

        Args:
            device: What this rank computes on.

        Raises:
            RankLostError: A rank died, or cannot be reached.
        """
        if self.num_ranks == 1:
            return
        self.say(f"device/{self.rank}", identify_gpu(device))
        devices = [self.ask(f"device/{rank}") for rank in range(self.num_ranks)]
        is_direct = None not in devices and len(set(devices)) == self.num_ranks
        links = self._links = Links(self.place, device, is_direct=is_direct)
        failure = (
            "the ranks do not find each other: name the network interface that all machines share "
            "(GLOO_SOCKET_IFNAME, with GPUs NCCL_SOCKET_IFNAME)"
        )
        with native_output_dropped():
            self._wait(Errand(lambda: links.connect(self._link_store)), failure, limit_s=_CONNECT_S)

    def say(self, key: str, value: Any) -> None:
        """Tell all ranks a JSON value.

        Raises:
            RankLostError: A rank died.
        """
        text = json.dumps(value)
        self._guard(lambda: self._store.set(f"said/{key}", text))
        if self._watch is None and self._on_look is not None:
            self._on_look()

    def has_said(self, key: str) -> bool:
        """Whether a value was told.

        Raises:
            RankLostError: A rank died.
        """
        return bool(self._guard(lambda: self._store.check([f"said/{key}"])))

    def ask(self, key: str) -> Any:
        """The value that a rank tells; waits for it.

        Raises:
            RankLostError: A rank died.
        """
        while not self.has_said(key):
            self.check()
            time.sleep(_POLL_S)
        return json.loads(self._guard(lambda: self._store.get(f"said/{key}")))

    def send(self, tensor: torch.Tensor, *, to: int) -> None:
        """Pass a tensor on, without waiting for who takes it; it must not change any more."""
        assert self._links is not None, "the ranks joined"
        self._sent.append(self._links.send(tensor, to=to))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, *, source: int) -> torch.Tensor:
        """The tensor that a rank passes on, of this shape and dtype, on this rank's device.

        Raises:
            RankLostError: A rank died.
        """
        assert self._links is not None, "the ranks joined"
        errand = self._links.receive(shape, dtype, source=source)
        tensor: torch.Tensor = self._wait(errand, f"{self.name(source)} cannot be reached")
        return tensor

    def flush(self) -> None:
        """Wait until all that was sent is taken.

        Raises:
            RankLostError: A rank died.
        """
        for errand in self._sent:
            self._wait(errand, f"{self.name(self.rank + 1)} cannot be reached")

    def settle(self) -> None:
        """Need no other rank any more: from here on none is waited for, and no loss interrupts this one."""
        self._is_settled = True
        if self._stopper is not None:
            self._stopper.disarm()

    def check(self) -> None:
        """Pass, or raise where a rank died that is needed.

        Raises:
            RankLostError: It did.
            ToldError: It did, and said so itself, or another rank did.
        """
        if self._watch is not None and self._watch.has_loss and not self._is_settled:
            raise self._loss(self._watch)

    def leave(self) -> None:
        """Say that this rank is done, and wait until rank 0 is, which ends the run.

        Nobody needs a rank that is done; of the others' deaths rank 0 judges alone, which may need them still.

        Raises:
            RankLostError: Rank 0 died.
            ToldError: Rank 0 failed, and said why.
        """
        self.settle()
        watch = self._watch
        if watch is None:
            return
        Errand(lambda: watch.tell(DONE)).is_over(_FAREWELL_S)
        while self.rank > 0 and not watch.is_done(0):
            if 0 in watch.lost or watch.store_fault is not None:
                raise self._loss(watch)
            time.sleep(_POLL_S)
        watch.stop()
        if self._links is not None:
            Errand(self._links.close).is_over(_FAREWELL_S)

    def on_look(self, call: Callable[[], None] | None) -> None:
        """Call something twice a second from another thread; where there is one rank, whenever it says something."""
        self._on_look = call
        if self._watch is not None:
            self._watch.on_look(call)

    def fail(self, error: BaseException) -> Mm2Error:
        """Tell the others that this rank ends; gives the error to end with."""
        told = self._explain_own(error)
        watch = self._watch
        if watch is not None:
            Errand(lambda: watch.tell(FAILED)).is_over(_FAREWELL_S)
            # A thread that is within the store when Python ends takes the process down with SIGABRT.
            watch.stop()
        return told

    def _explain_own(self, error: BaseException) -> Mm2Error:
        if isinstance(error, InterruptedRunError):
            return self._explain(_EXPLAIN_STOP_S, f"{self.name(self.rank)} was told to stop")
        if isinstance(error, (RankLostError, ToldError)):
            return error
        text, exit_code = str(error), getattr(error, "exit_code", CannotRunError.exit_code)
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted"
        elif not isinstance(error, Mm2Error):
            text = f"unexpected {type(error).__name__}: {text}" if str(error) else type(error).__name__
        if not self._is_first_to_tell(text):
            return ToldError(exit_code)
        if isinstance(error, UsageError):
            return error
        return RankLostError(f"{self.name(self.rank)} failed: {text}")

    def _guard(self, call: Callable[[], Any]) -> Any:
        """What a call of the store gives; it may not answer any more."""
        return call() if self._watch is None else self._wait(Errand(call), _STORE_GONE)

    def _wait(self, errand: Errand, failure: str, *, limit_s: float | None = None) -> Any:
        """What an errand gives, looking round meanwhile.

        Args:
            errand: What to wait for.
            failure: What to say where it ends by an error of torch's, or not in time.
            limit_s: How long it may take.
        """
        begun_s = time.monotonic()
        while not errand.is_over(_POLL_S):
            self.check()
            if limit_s is not None and time.monotonic() - begun_s > limit_s:
                raise RankLostError(failure, found=f"no connection after {limit_s:.0f} s")
        if errand.error is None:
            return errand.result
        if not isinstance(errand.error, RuntimeError):
            raise errand.error
        # The connection broke: whose fault that is shows a moment later.
        text = str(errand.error) or type(errand.error).__name__
        raise self._explain(_EXPLAIN_S, f"{failure}: {text.splitlines()[0]}") from errand.error

    def _explain(self, patience_s: float, otherwise: str) -> Mm2Error:
        """Who died, as soon as it is known; or, where it does not show, what did show."""
        deadline = time.monotonic() + patience_s
        while self._watch is not None and time.monotonic() < deadline:
            if self._watch.has_loss:
                return self._loss(self._watch)
            time.sleep(_POLL_S)
        if self._is_first_to_tell("lost"):
            return RankLostError(otherwise, next_step=_RESUME)
        return ToldError(CannotRunError.exit_code)

    def _loss(self, watch: Watch) -> Mm2Error:
        # Who failed said why itself; and one survivor is enough to tell of the dead.
        lost = watch.lost
        silent = {rank: reason for rank, reason in lost.items() if reason}
        if not lost:
            # Nobody keeps count any more: each machine's log has it.
            return RankLostError(f"{_STORE_GONE}: {watch.store_fault}", next_step=_RESUME)
        if len(silent) < len(lost) or not self._is_first_to_tell("lost"):
            return ToldError(CannotRunError.exit_code)
        rank, reason = min(silent.items())
        return RankLostError(f"{self.name(rank)} died: {reason}", next_step=_RESUME)

    def _is_first_to_tell(self, text: str) -> bool:
        key = f"told/{hashlib.sha256(text.encode()).hexdigest()}"
        errand = Errand(lambda: self._store.add(key, 1))
        # Where the store is gone, nobody keeps count any more.
        return not errand.is_over(_FAREWELL_S) or errand.error is not None or int(errand.result) == 1


_STORE_GONE = "the store through which the ranks talk, torchrun's on the first machine, cannot be reached"


@contextlib.contextmanager
def open_ranks(place: RankPlace) -> Iterator[RankGroup]:
    """Meet the other ranks; whatever ends the block ends them too, and one of them says why.

    To be called in the main thread: it is interrupted when a rank dies.

    Raises:
        ToldError: The block ended by an error that another rank told of.
        CannotRunError: The ranks did not meet.
    """
    if place.num_ranks == 1:
        yield RankGroup(place, LocalStore())
        return
    with Stopper() as stopper:
        ranks = _meet(place, stopper)
        try:
            try:
                yield ranks
            finally:
                stopper.disarm()
        except (Exception, KeyboardInterrupt, InterruptedRunError) as error:
            raise ranks.fail(error) from error


def _meet(place: RankPlace, stopper: Stopper) -> RankGroup:
    if not torch.distributed.is_available():
        raise BackendError("several ranks need torch.distributed", found="a torch that was built without it")
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    failure = f"{_STORE_GONE} (MASTER_ADDR={os.environ.get('MASTER_ADDR')})"
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_CONNECT_S)))
        errand = Errand(lambda: meet(store, place))
        # A little more than it takes itself: where the store hangs, it does not see the time.
        if not errand.is_over(ARRIVAL_S + _CONNECT_S):
            raise CannotRunError(failure)
    except InterruptedRunError:
        raise CannotRunError(f"rank {place.rank} was told to stop before all ranks were there") from None
    except (RuntimeError, ValueError) as error:
        raise CannotRunError(failure, found=str(error)) from error
    if errand.error is not None:
        if isinstance(errand.error, RuntimeError):
            raise CannotRunError(failure, found=str(errand.error)) from errand.error
        raise errand.error
    meeting = errand.result

    def connect(prefix: str) -> Any:
        return PrefixStore(f"{meeting.nonce}{prefix}", store.clone())

    watch = Watch(connect(""), place.rank, meeting.processes, on_loss=stopper.interrupt)
    watch.start()
    return RankGroup(
        place,
        connect(""),
        nonce=meeting.nonce,
        watch=watch,
        stopper=stopper,
        link_store=connect("/links"),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

"""Ranks: the processes of a run that torchrun started, one for each slice of a plan, and how they talk.

| to | call |
|---|---|
| tell all ranks a value, wait for one | `say(key, value)`, `ask(key)` |
| pass hidden states on, take them | `send(tensor, to=…)`, `receive(shape, …)` |

Every wait ends when another rank dies: whoever notices names it, and all end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from gpu_reference.watch import Watch
from minimax_tools.errors import CannotRunError, Mm2Error, UsageError
from minimax_tools.native_output import native_output_dropped

_POLL_S = 0.02
# Hidden states may be waited for as long as the ranks before need: it is the watch that ends a wait.
_TIMEOUT = timedelta(days=30)
# How long to look for who died, when it shows that somebody did.
_EXPLAIN_S = 45.0
_EXPLAIN_STOP_S = 5.0


class ToldError(Mm2Error):
    """The run ended, and another rank said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another rank said why the run ended")
        self.exit_code = exit_code


class RankLostError(CannotRunError):
    """A rank died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank this process is, as torchrun's environment says; the only one where nothing says."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int

    @classmethod
    def from_environment(cls) -> RankPlace:
        """This process's."""
        num_ranks = int(os.environ.get("WORLD_SIZE") or 1)
        return cls(
            rank=int(os.environ.get("RANK") or 0),
            num_ranks=num_ranks,
            local_rank=int(os.environ.get("LOCAL_RANK") or 0),
            num_local=int(os.environ.get("LOCAL_WORLD_SIZE") or num_ranks),
        )


class Ranks:
    """The ranks of a run, as one of them sees them; made by `open_ranks`.

    Attributes:
        place: Which one this is.
    """

    def __init__(self, place: RankPlace, store: Any) -> None:
        self.place = place
        self._store = store
        self._nodes: tuple[str, ...] = ()
        self._watch: Watch | None = None
        self._transfers: list[_Transfer] = []
        self._device = torch.device("cpu")
        self._is_direct = False

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
                f"the plan has {len(nodes)} slices for {self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}",
                expected=f"a rank for each of {', '.join(nodes)}",
                next_step=f"Start it as: torchrun --nproc-per-node {len(nodes)} -m gpu_reference extract-all "
                "--plan … --model … (on several machines, with --nnodes and --rdzv-endpoint too).",
            )
        self._nodes = tuple(nodes)

    def join(self, device: torch.device) -> None:
        """Open the process group: nccl where every rank has a GPU of its own, else gloo.

        Args:
            device: What this rank computes on.

        Raises:
            RankLostError: A rank died.
        """
        self._device = device
        if self.num_ranks == 1:
            return
        self._watch = Watch(self._store.clone(), self.rank, self.num_ranks)
        self._watch.start()
        self.say(f"device/{self.rank}", _identify(device))
        devices = [self.ask(f"device/{rank}") for rank in range(self.num_ranks)]
        self._is_direct = None not in devices and len(set(devices)) == self.num_ranks
        with native_output_dropped():
            self._guard(self._open_group)

    def _open_group(self) -> None:
        torch.distributed.init_process_group(
            "nccl" if self._is_direct else "gloo",
            store=PrefixStore("group", self._store.clone()),
            rank=self.rank,
            world_size=self.num_ranks,
            timeout=_TIMEOUT,
        )

    def say(self, key: str, value: Any) -> None:
        """Tell all ranks a JSON value."""
        self._store.set(f"said/{key}", json.dumps(value))

    def has_said(self, key: str) -> bool:
        """Whether a value was told."""
        return bool(self._store.check([f"said/{key}"]))

    def ask(self, key: str) -> Any:
        """The value that a rank tells; waits for it.

        Raises:
            RankLostError: A rank died.
        """
        while not self.has_said(key):
            self.check()
            time.sleep(_POLL_S)
        return json.loads(self._store.get(f"said/{key}"))

    def send(self, tensor: torch.Tensor, *, to: int) -> None:
        """Pass a tensor on, without waiting for who takes it; it must not change any more."""
        tensor = tensor.detach().to(self._wire).contiguous()
        self._transfers.append(_Transfer(lambda: torch.distributed.send(tensor, to), self._device))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, *, source: int) -> torch.Tensor:
        """The tensor that a rank passes on, of this shape and dtype, on this rank's device.

        Raises:
            RankLostError: A rank died.
        """
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._wire)
        self._guard(lambda: torch.distributed.recv(tensor, source), peer=source)
        return tensor.to(self._device)

    @property
    def _wire(self) -> torch.device:
        """Where tensors are that travel."""
        return self._device if self._is_direct else torch.device("cpu")

    def check(self) -> None:
        """Pass, or raise where a rank died.

        Raises:
            RankLostError: It did.
            ToldError: It did, and said so itself, or another rank did.
        """
        if self._watch is not None and self._watch.lost:
            raise self._lost_error(self._watch.lost)

    def finish(self) -> None:
        """Wait until all is passed on, all ranks are done, and leave the group.

        Raises:
            RankLostError: A rank died.
        """
        for transfer in self._transfers:
            self._wait(transfer, peer=self.rank + 1)
        if self._watch is None:
            return
        self._store.set(f"done/{self.rank}", "")
        while not self._store.check([f"done/{rank}" for rank in range(self.num_ranks)]):
            self.check()
            time.sleep(_POLL_S)
        self._watch.stop()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def on_look(self, call: Callable[[], None] | None) -> None:
        """Call something twice a second from the watch's thread, where there are several ranks."""
        if self._watch is not None:
            self._watch.on_look(call)

    def fail(self, error: BaseException) -> Mm2Error:
        """Tell the others that this rank ends; gives the error to end with."""
        if isinstance(error, _StoppedBySignalError):
            return self._explain(_EXPLAIN_STOP_S, f"{self.name(self.rank)} was told to stop")
        if isinstance(error, (RankLostError, ToldError)):
            return error
        text, exit_code = str(error), getattr(error, "exit_code", CannotRunError.exit_code)
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted"
        elif not isinstance(error, Mm2Error):
            text = f"unexpected {type(error).__name__}: {text}" if str(error) else type(error).__name__
        is_first = self._is_first_to_tell(text)
        self._store.set(f"failed/{self.rank}", "")
        if not is_first:
            return ToldError(exit_code)
        if isinstance(error, UsageError):
            return error
        return RankLostError(f"{self.name(self.rank)} failed: {text}")

    def _guard(self, call: Callable[[], object], *, peer: int | None = None) -> None:
        """Run what may wait for ever in a thread, and look round meanwhile."""
        self._wait(_Transfer(call, self._device), peer=peer)

    def _wait(self, transfer: _Transfer, *, peer: int | None) -> None:
        while not transfer.is_over(_POLL_S):
            self.check()
        if transfer.error is None:
            return
        if not isinstance(transfer.error, RuntimeError):
            raise transfer.error
        # The connection broke: whose fault that is shows a moment later.
        what = (
            f"{self.name(peer)} cannot be reached" if peer is not None else "the ranks do not find each other"
        )
        raise self._explain(_EXPLAIN_S, f"{what}: {str(transfer.error).splitlines()[0]}") from transfer.error

    def _explain(self, patience_s: float, otherwise: str) -> Mm2Error:
        """Who died, as soon as it is known; or, where it does not show, what did show."""
        deadline = time.monotonic() + patience_s
        while self._watch is not None and time.monotonic() < deadline:
            self._watch.look()
            if self._watch.lost:
                return self._lost_error(self._watch.lost)
            time.sleep(_POLL_S)
        return RankLostError(otherwise) if self._is_first_to_tell("lost") else self._told()

    def _lost_error(self, lost: dict[int, str]) -> Mm2Error:
        # Who failed said why itself; and one survivor is enough to tell of the dead.
        silent = {rank: reason for rank, reason in lost.items() if reason}
        if len(silent) < len(lost) or not self._is_first_to_tell("lost"):
            return self._told()
        rank, reason = min(silent.items())
        return RankLostError(
            f"{self.name(rank)} died: {reason}",
            next_step="Run the same command again: it resumes after the layers that are stored.",
        )

    @staticmethod
    def _told() -> ToldError:
        return ToldError(CannotRunError.exit_code)

    def _is_first_to_tell(self, text: str) -> bool:
        try:
            key = hashlib.sha256(text.encode()).hexdigest()
            return int(self._store.add(f"told/{key}", 1)) == 1
        except RuntimeError:
            # Nobody keeps count any more.
            return True


@contextlib.contextmanager
def open_ranks(place: RankPlace) -> Iterator[Ranks]:
    """Meet the other ranks; whatever ends the block ends them too, and one of them says why.

    Raises:
        ToldError: The block ended by an error that another rank told of.
    """
    if place.num_ranks == 1:
        yield Ranks(place, HashStore())
        return
    store, _, _ = next(rendezvous("env://"))
    ranks = Ranks(place, store)
    with _stopping_by_exception():
        try:
            yield ranks
        except (Exception, KeyboardInterrupt, _StoppedBySignalError) as error:
            raise ranks.fail(error) from error


class _StoppedBySignalError(BaseException):
    """torchrun ends the ranks that are left when one has died; nothing that runs then may take it for its own error."""


@contextlib.contextmanager
def _stopping_by_exception() -> Iterator[None]:
    """Turn the first SIGTERM into an exception, so that this rank can say why it ends."""

    def stop(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise _StoppedBySignalError

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Transfer:
    """A call that goes on in a thread, which ends with the process if the call does not."""

    def __init__(self, call: Callable[[], object], device: torch.device) -> None:
        self._call = call
        self._device = device
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_over(self, patience_s: float) -> bool:
        """Whether it ended, in well or in `error`."""
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                with torch.cuda.device(self._device):
                    self._call()
                    torch.cuda.current_stream().synchronize()
            else:
                self._call()
        except Exception as error:
            self.error = error


def _identify(device: torch.device) -> str | None:
    """What tells one GPU from all others; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None

"""RankGroup: the ranks of a run, as one of them sees them.

torchrun starts the ranks, names the one that dies, and ends the others. A rank that waits for a dead one loses its
connection, which ends the wait. Of the ranks that then fail, the first one reports.

RankPlace: this process's rank among those of a run, as torchrun's environment variables say.

RankMessages: Python values sent from rank 0, the lead, to all other ranks, and gathered from them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from minimax_tools.errors import BackendError, CannotRunError, Mm2Error, UsageError, format_count
from minimax_tools.machine.native_output import native_output_dropped
from minimax_tools.ranks.failure import (
    RESUME,
    RankFailedError,
    RankFailure,
    RankLostError,
    ReportedElsewhereError,
    attempt_store,
    connect_store,
    current_attempt,
    find_first_failure,
    store_errors,
)

logger = logging.getLogger(__name__)

# Time between two looks into the store, in seconds.
_POLL_S = 0.02
# Longest waits in seconds: for all ranks to start, and then for the connections between them.
_ARRIVAL_S, _CONNECT_S = 300.0, 120.0
# Longest wait for another rank at work. The lead of a run may read, write and judge for long; a rank of a plan waits as
# long as those before it compute.
_MESSAGE_TIMEOUT, _PLAN_TIMEOUT = timedelta(hours=2), timedelta(days=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank among those of a run."""

    rank: int = 0  # number of the rank in the run, from 0
    num_ranks: int = 1  # number of ranks of the run
    local_rank: int = 0  # number of the rank on its machine, from 0
    num_local: int = 1  # number of ranks on this machine

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RankPlace:
        """Read this process's place. If WORLD_SIZE is 1 or unset, it is the only rank.

        Without LOCAL_WORLD_SIZE all ranks are on one machine. Without LOCAL_RANK each machine has the next ranks.

        Raises:
            UsageError: A variable is no whole number, RANK is not below WORLD_SIZE, or LOCAL_WORLD_SIZE is 0.
        """

        def read(name: str, default: int) -> int:
            text = environment.get(name) or str(default)
            if not text.isdecimal():
                raise UsageError(f"{name} is no whole number", found=text, next_step="Start with torchrun.")
            return int(text)

        num_ranks = read("WORLD_SIZE", 1)
        if num_ranks <= 1:
            return cls()
        rank = read("RANK", 0)
        if rank >= num_ranks:
            raise UsageError(
                f"RANK={rank} is no rank of {num_ranks}",
                expected=f"0 to {num_ranks - 1}",
                next_step="Start all ranks with one torchrun command, or unset RANK and WORLD_SIZE.",
            )
        num_local = read("LOCAL_WORLD_SIZE", num_ranks)
        if num_local == 0:
            raise UsageError(
                "LOCAL_WORLD_SIZE is 0", expected="1 or more", next_step="Start with torchrun, or unset it."
            )
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            local_rank=read("LOCAL_RANK", rank % num_local),
            num_local=num_local,
        )


def warn_of_idle_cores(place: RankPlace) -> None:
    """Warn, on rank 0, if each of several ranks computes with one thread while cores are idle."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = num_cores // place.num_local
    is_lead_of_several = place.rank == 0 and place.num_ranks > 1
    if is_lead_of_several and os.environ.get("OMP_NUM_THREADS") == "1" and num_threads > 1:
        logger.warning(
            "OMP_NUM_THREADS is 1, torchrun's default: each of %d ranks here computes with one of %d cores. "
            "Set it to %d. A capture resumes only with the value that it was begun with.",
            place.num_local,
            num_cores,
            num_threads,
        )


class BackgroundCall:
    """A call that runs in its own thread from now on. If it never returns, its thread ends with the process.

    `result` is the call's return value, and `error` the exception that ended it.
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


class RankMessages:
    """Messages between the ranks of a run. A single rank sends to nobody.

    They go through their own gloo group, apart from the collective calls of a port. Values are pickled.
    """

    def __init__(self, rank: int = 0, num_ranks: int = 1, *, timeout: timedelta = _MESSAGE_TIMEOUT) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout = timeout
        self.group: Any = None  # the gloo group; None before `open`, and with a single rank

    def open(self) -> None:
        """Open the group, on all ranks; torch's process group must be up."""
        if self._num_ranks > 1:
            with native_output_dropped():
                self.group = torch.distributed.new_group(backend="gloo", timeout=self._timeout)

    def send(self, message: Any) -> None:
        """Send a value from the lead to all other ranks, each of which calls `receive`."""
        if self._num_ranks > 1:
            torch.distributed.broadcast_object_list([message], src=0, group=self.group)

    def receive(self) -> Any:
        """Wait for the lead's next value, on another rank, and return it."""
        messages = [None]
        torch.distributed.broadcast_object_list(messages, src=0, group=self.group)
        return messages[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on the lead; [] on the other ranks. All ranks call it."""
        if self._num_ranks == 1:
            return [value]
        values = [None] * self._num_ranks if self._rank == 0 else None
        torch.distributed.gather_object(value, values, dst=0, group=self.group)
        return values or []


class RankGroup:
    """The ranks of a run, as one of them sees them; made by `open_ranks`.

    Every call that waits for a rank raises RankLostError if that one is lost, or has failed.
    """

    def __init__(self, place: RankPlace, store: Any) -> None:
        self.place = place
        self.nonce = ""  # name of this attempt, which no other run shares
        self._store = store
        self._messages = RankMessages(place.rank, place.num_ranks, timeout=_PLAN_TIMEOUT)
        self._device = torch.device("cpu")
        self._wire = torch.device("cpu")  # device of tensors on their way
        self._nodes: tuple[str, ...] = ()  # the plan's node of each rank; empty until `assign`
        self._sent: list[BackgroundCall] = []

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

    def meet(self) -> None:
        """Wait until all ranks are there, and agree on the attempt's name.

        Raises:
            CannotRunError: A rank did not come in time.
        """
        self.publish(f"met/{self.rank}", uuid.uuid4().hex)
        deadline = time.monotonic() + _ARRIVAL_S
        while missing := [rank for rank in range(self.num_ranks) if not self.is_published(f"met/{rank}")]:
            if time.monotonic() > deadline:
                raise CannotRunError(
                    f"{', '.join(map(self.name, missing))} did not come within {_ARRIVAL_S:.0f} s",
                    next_step="Look for the error of each above, or in the log of its machine.",
                )
            self._pause()
        self.nonce = self.wait_for("met/0")

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
        """Open the process group for this rank's device: nccl if every rank has its own GPU, else gloo."""
        if self.num_ranks == 1:
            return
        self._device = device
        self.publish(f"device/{self.rank}", _identify_gpu(device))
        devices = [self.wait_for(f"device/{rank}") for rank in range(self.num_ranks)]
        if None not in devices and len(set(devices)) == self.num_ranks:
            self._wire = device
        failure = (
            "the ranks do not find each other: name the network interface that all machines share "
            "(GLOO_SOCKET_IFNAME, with GPUs NCCL_SOCKET_IFNAME)"
        )
        with native_output_dropped():
            self._wait(BackgroundCall(self._connect), failure, limit_s=_CONNECT_S)

    def publish(self, key: str, value: Any) -> None:
        """Publish a JSON value to all ranks."""
        with store_errors():
            self._store.set(f"said/{key}", json.dumps(value))

    def is_published(self, key: str) -> bool:
        """Return True if a rank has published a value under this key."""
        with store_errors():
            return bool(self._store.check([f"said/{key}"]))

    def wait_for(self, key: str) -> Any:
        """Wait for the value that a rank publishes under this key, and return it."""
        while not self.is_published(key):
            self._pause()
        with store_errors():
            return json.loads(self._store.get(f"said/{key}"))

    def send(self, tensor: torch.Tensor, *, to: int) -> None:
        """Send a tensor without waiting for its receiver; do not change it any more. One tensor at a time to a rank."""
        tensor = tensor.detach().to(self._wire).contiguous()
        self._sent.append(BackgroundCall(self._on_wire(lambda: torch.distributed.send(tensor, to))))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, *, source: int) -> torch.Tensor:
        """Wait for a tensor of this shape and dtype from a rank; return it on this rank's device."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._wire)
        call = BackgroundCall(self._on_wire(lambda: torch.distributed.recv(tensor, source)))
        self._wait(call, f"{self.name(source)} cannot be reached")
        return tensor.to(self._device)

    def flush(self) -> None:
        """Wait until every tensor sent has been received. Tensors go to the next rank only."""
        for call in self._sent:
            self._wait(call, f"{self.name(self.rank + 1)} cannot be reached")

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on rank 0; [] on the other ranks. All ranks call it."""
        call = BackgroundCall(lambda: self._messages.gather(value))
        values: list[Any] = self._wait(call, "another rank cannot be reached")
        return values

    def error_of(self, error: BaseException) -> Mm2Error:
        """Record that this rank fails by `error`, and return the error to end with: the first to fail reports."""
        name = self.name(self.rank)
        if isinstance(error, KeyboardInterrupt):
            own: Mm2Error = RankLostError(f"{name} was told to stop", next_step=RESUME)
        elif isinstance(error, (RankLostError, UsageError)):
            own = error
        else:
            kind = "" if isinstance(error, Mm2Error) else f"unexpected {type(error).__name__}: "
            own = RankFailedError(name, f"{kind}{error}")
        first = find_first_failure(self._store, RankFailure(rank=self.rank, text=str(own)), cause=error)
        return own if first.rank == self.rank else ReportedElsewhereError(own.exit_code)

    def _pause(self) -> None:
        """Let other ranks work for a moment.

        Raises:
            RankFailedError: One of them has failed.
        """
        with store_errors():
            failure = RankFailure.read(self._store)
        if failure is not None:
            raise RankFailedError(self.name(failure.rank), failure.text)
        time.sleep(_POLL_S)

    def _wait(self, call: BackgroundCall, failure: str, *, limit_s: float | None = None) -> Any:
        """Wait for a call, so that a signal ends the wait, and return its result.

        `failure` is the error's text if torch raises one in the call, or if the call takes over `limit_s` seconds.
        """
        begun_s = time.monotonic()
        while not call.is_over(_POLL_S):
            if limit_s is not None and time.monotonic() - begun_s > limit_s:
                raise RankLostError(failure, found=f"no connection after {limit_s:.0f} s")
        if isinstance(call.error, RuntimeError):
            found = (str(call.error) or type(call.error).__name__).splitlines()[0]
            raise RankLostError(failure, found=found, next_step=RESUME) from call.error
        if call.error is not None:
            raise call.error
        return call.result

    def _connect(self) -> None:
        is_direct = self._wire.type == "cuda"
        if is_direct:
            # A lost rank ends a wait by an exception; nccl's own guard would end this process without a word.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            torch.cuda.set_device(self._device)
        torch.distributed.init_process_group(
            "nccl" if is_direct else "gloo",
            # A connection of its own: nccl may block within it.
            store=self._store.clone(),
            rank=self.rank,
            world_size=self.num_ranks,
            timeout=_PLAN_TIMEOUT,
        )
        self._messages.open()

    def _on_wire(self, call: Callable[[], object]) -> Callable[[], object]:
        """Let a call of nccl run in its own stream, so that no computation on the GPU waits for another rank."""
        if self._wire.type != "cuda":
            return call
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))

        def run() -> None:
            with torch.cuda.stream(stream):
                call()
            # Wait until the tensor has been sent or received: `call` keeps it alive until then.
            stream.synchronize()

        return run


@contextmanager
def open_ranks(place: RankPlace) -> Iterator[RankGroup]:
    """Meet the other ranks for the block. An error in it ends them too, and one rank reports it.

    Raises:
        ReportedElsewhereError: An error ended the block, and another rank reported it.
        CannotRunError: The ranks did not meet.
    """
    if not torch.distributed.is_available():
        raise BackendError("a plan needs torch.distributed", found="a torch that was built without it")
    if place.num_ranks == 1:
        yield RankGroup(place, torch.distributed.HashStore())  # type: ignore[attr-defined]  # not in its __all__
        return
    store = connect_store(timedelta(seconds=_CONNECT_S))
    ranks = RankGroup(place, attempt_store(store, attempt=current_attempt()))
    try:
        ranks.meet()
        yield ranks
    except (Exception, KeyboardInterrupt) as error:
        raise ranks.error_of(error) from error
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _identify_gpu(device: torch.device) -> str | None:
    """Return the id that tells a GPU from all others, so that ranks see whether they share one; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None

"""Ranks of a command: launched as child processes; rank 0 leads, and the others follow it.

Unlike torchrun, `launch_ranks` returns the exit code of rank 0, or raises an error that names the rank that failed. A
rank's exit code counts only if mm2 itself chose it: a port may end its process with any other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from minimax_tools.command_line.console import end_command, show_warnings_only, speak_as
from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.machine.native_output import native_output_dropped
from minimax_tools.machine.stops import given_arguments
from minimax_tools.ranks.failure import RESUME, RankFailedError, RankFailure, attempt_store, record_end
from minimax_tools.ranks.rank_group import RankPlace
from neuron.devices.backend import Backend, choose_backend
from neuron.devices.compiler import AUTO
from neuron.devices.distributed import refuse_launched
from neuron.devices.ranks import Ranks, read_ranks
from neuron.devices.runtime import open_runtime
from neuron.process.record import StatusRecord
from neuron.process.status import RECORD_VARIABLE, discard_output
from neuron.process.supervisor import describe_end, describe_timeout

_HOST = "127.0.0.1"
_POLL_S = 0.05
# Longest wait for rank 0 to report why the run failed, and for the other ranks to exit after it.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankProcess:
    """A rank that was started."""

    process: subprocess.Popen[bytes]
    record: StatusRecord  # memory in which the rank writes its activity, its time limit, and the exit code mm2 chose

    @property
    def exit_code(self) -> int | None:
        """The exit code that mm2 chose in the rank; None while it runs, and if something else ended it."""
        return None if self.process.poll() is None else self.record.read().exit_code

    @property
    def is_waiting(self) -> bool:
        """True if the rank runs outside the port's code, where it may wait for another rank."""
        return self.process.poll() is None and not self.record.read().is_in_port

    def describe_failure(self) -> str | None:
        """Say why the rank failed; return None if it still runs, or succeeded."""
        # The process is looked at first: if it has ended, the status read then is its last.
        exit_code = self.process.poll()
        status = self.record.read()
        if exit_code is None:
            return describe_timeout(status) if status.is_overdue(time.monotonic()) else None
        if status.exit_code is None:
            return describe_end(exit_code, status)
        return f"it ended with exit code {status.exit_code}" if status.exit_code else None


def launch_ranks(
    num_ranks: int, arguments: Sequence[str], *, environment: Mapping[str, str] = os.environ
) -> int:
    """Run `python -m neuron ARGUMENTS` as several ranks, wait for them, and return the exit code of rank 0.

    The ranks get `environment`, and variables that tell each its rank.
    """
    # This process serves the store, at any free port (0). It outlives every rank, and no other process can take the
    # port before the ranks connect.
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # not in its __all__
        _HOST, 0, is_master=True, wait_for_workers=False
    )
    ranks: list[_RankProcess] = []
    try:
        for rank in range(num_ranks):
            ranks.append(_start(rank, num_ranks, arguments, environment, store_port=store.port))
        return _supervise(ranks, attempt_store(store))
    except KeyboardInterrupt:
        if not ranks:
            raise
        # The ranks run in sessions of their own. Rank 0 reports the interrupt; the others are stopped below.
        ranks[0].process.send_signal(signal.SIGINT)
        _wait_for_exit(ranks[0])
        exit_code = ranks[0].exit_code
        if exit_code is None:
            raise
        return exit_code
    finally:
        _stop(ranks)


def _start(
    rank: int, num_ranks: int, arguments: Sequence[str], environment: Mapping[str, str], *, store_port: int
) -> _RankProcess:
    record = StatusRecord.create()
    rank_variables = {
        RECORD_VARIABLE: record.descriptor,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": store_port,
        # torch and torch_xla then expect the store to be served already, as by torchrun.
        "TORCHELASTIC_RUN_ID": "mm2",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "neuron", *arguments],
        env={
            # First, so that a number in `environment` counts.
            "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // num_ranks)),
            **environment,
            **{name: str(value) for name, value in rank_variables.items()},
        },
        stdin=subprocess.DEVNULL,
        # Only this process gets a Ctrl-C, and passes it to rank 0: otherwise each rank would report the others.
        start_new_session=True,
        pass_fds=(record.descriptor,),
    )
    return _RankProcess(process=process, record=record)


def _supervise(ranks: Sequence[_RankProcess], store: Any) -> int:
    """Wait for rank 0 and return its exit code; raise RankFailedError if a rank fails and rank 0 does not report it."""
    lead = ranks[0]
    finished: set[int] = set()
    while True:
        _record_finished(ranks, finished, store)
        failure = _find_failure(ranks)
        if failure is not None and failure.rank > 0:
            # Rank 0 finds the failure in the store, reports it and exits.
            failure.record(store)
            _wait_for_exit(lead)
        exit_code = lead.exit_code
        if exit_code is not None:
            # Rank 0 has ended, so the exit codes of the other ranks no longer matter.
            for rank in ranks[1:]:
                _wait_for_exit(rank)
            return exit_code
        if failure is not None:
            # Rank 0 did not report it in time, and must not begin now: this process does, without rank 0's output.
            lead.process.kill()
            lead.process.wait()
            discard_output()
            # A failure that the store already holds came first, and caused this one.
            cause = failure.record(store)
            raise RankFailedError(f"rank {cause.rank}", cause.text, next_step=RESUME)
        time.sleep(_POLL_S)


def _record_finished(ranks: Sequence[_RankProcess], finished: set[int], store: Any) -> None:
    """Record each rank after rank 0 that has succeeded, once; `finished` holds the ranks recorded so far."""
    # A rank that then loses its connection to such a rank finds the reason in the store.
    for number, rank in enumerate(ranks):
        if number > 0 and number not in finished and rank.exit_code == 0:
            finished.add(number)
            record_end(store, number)


def _find_failure(ranks: Sequence[_RankProcess]) -> RankFailure | None:
    failures = {number: text for number, rank in enumerate(ranks) if (text := rank.describe_failure())}
    if not failures:
        return None
    # If a rank hangs in the port's code, the ranks that wait for it become overdue too: they are the last choice.
    first = min(failures, key=lambda number: (ranks[number].is_waiting, number))
    return RankFailure(rank=first, text=failures[first])


def _wait_for_exit(rank: _RankProcess) -> None:
    """Wait until a rank's process has ended, or the grace period is over."""
    with suppress(subprocess.TimeoutExpired):
        rank.process.wait(_GRACE_S)


def _stop(ranks: Sequence[_RankProcess]) -> None:
    running = [rank for rank in ranks if rank.process.poll() is None]
    for rank in running:
        rank.process.terminate()
    for rank in running:
        _wait_for_exit(rank)
        rank.process.kill()
        rank.process.wait()
    for rank in ranks:
        rank.record.close()


def run_on_ranks(command: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Run a command on rank 0 with `ranks` in place of the rank options, and follow it on the other ranks.

    If several ranks are asked for and none was launched, they are launched here, and the command ends with the exit
    code of rank 0. The other ranks follow rank 0's orders, and print only warnings and errors.
    """
    # Before the backend is chosen: importing torch_xla sets variables that would mislead the ranks.
    environment = dict(os.environ)
    place = RankPlace.from_environment()
    ranks = _take_ranks(options, place)
    # With --skip-compile a saved run is only shown, by rank 0 alone.
    if not ranks.are_several or options.get("skip_compile"):
        return command(**options, ranks=ranks) if ranks.is_lead else None
    backend = choose_backend(options["backend"])
    refuse_launched(backend)  # xla-cpu under torchrun: its collectives are wrong
    # On xla-cpu, devices of this process stand for the ranks.
    if backend is not Backend.XLA_CPU and place.num_ranks == 1:
        end_command(launch_ranks(ranks.degree, given_arguments(), environment=environment))
    if ranks.is_lead:
        return command(**options, ranks=ranks)
    # Not all of these commands run layers alone, and compile them.
    return _follow_lead(options["backend"], options.get("compile_with", AUTO), ranks)


def _take_ranks(options: dict[str, Any], place: RankPlace) -> Ranks:
    """Remove the rank options from a command's options, and check them against the ranks that were launched."""
    try:
        return read_ranks(
            options.pop("tp_degree"),
            ep_degree=options.pop("ep_degree"),
            reduce_dtype=options.pop("reduce_dtype"),
        )
    except UsageError as error:
        if place.rank > 0:
            # Rank 0 reports the same error.
            end_command(error.exit_code)
        raise


def _follow_lead(backend: str, compile_with: str, ranks: Ranks) -> None:
    """Work for rank 0 until it sends no more. Drop the port's output, which would mix with the results."""
    show_warnings_only()
    speak_as(f"rank {ranks.rank}")
    try:
        with (
            native_output_dropped(),
            open_runtime(backend, compile_with=compile_with, ranks=ranks) as runtime,
        ):
            # One order for each executor of the lead's: it makes one here, which follows that.
            while (order := runtime.messages.receive()) is not None:
                order(runtime)
    except RankFailedError:
        # The failed rank reports it.
        end_command(CannotRunError.exit_code)

"""The launch of the ranks of a run as child processes, which all end when one of them ends.

Unlike torchrun, it ends with the exit code of rank 0, or of the rank that failed. A rank's exit code counts only where
mm2 itself chose it: a port may end its process with any other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed

from minimax_tools.ranks.failure import RESUME, RankFailedError, RankFailure, record_end
from minimax_tools.ranks.store import attempt_store
from neuron.process.ending import describe_end, describe_timeout
from neuron.process.record import StatusRecord
from neuron.process.status import RECORD_VARIABLE, discard_output

_HOST = "127.0.0.1"
# These end the ranks too, which are in sessions of their own.
_STOPPING = (signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.05
# How long rank 0 may take to report why the run ended, and the other ranks to end.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """A rank that was started.

    Args:
        record: The status that the process writes.
    """

    process: subprocess.Popen[bytes]
    record: StatusRecord

    @property
    def exit_code(self) -> int | None:
        """The exit code that mm2 chose in the rank; None before its end, and where something else ended it."""
        return None if self.process.poll() is None else self.record.read().exit_code

    @property
    def is_waiting(self) -> bool:
        """True if the rank runs outside the port's code, where it may wait for another rank."""
        return self.process.poll() is None and not self.record.read().is_in_port

    def failure(self) -> str | None:
        """Say why the rank failed; return None where it runs, or ended well."""
        # In this order: an ended process has written its last status.
        ended = self.process.poll()
        status = self.record.read()
        if ended is None:
            return describe_timeout(status) if status.overdue(time.monotonic()) else None
        if status.exit_code is None:
            return describe_end(ended, status)
        return f"it ended with exit code {status.exit_code}" if status.exit_code else None


def launch_ranks(
    num_ranks: int, arguments: Sequence[str], *, environment: Mapping[str, str] = os.environ
) -> int:
    """Run `python -m neuron ARGUMENTS` as several ranks, and wait for them.

    Args:
        num_ranks: Number of ranks.
        arguments: Arguments of the command, without its name.
        environment: Environment of the ranks, to which their own variables are added.

    Returns:
        The exit code of rank 0.

    Raises:
        RankFailedError: A rank died, or a layer took it too long, and rank 0 could not report it.
    """
    # This process serves the store: it outlives every rank, and no other process can take its port.
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # not in its __all__
        _HOST, 0, is_master=True, wait_for_workers=False
    )
    before = {number: signal.signal(number, _interrupt) for number in _STOPPING}
    ranks: list[_Rank] = []
    try:
        for number in range(num_ranks):
            ranks.append(_start(number, num_ranks, store.port, arguments, environment))
        return _wait(ranks, attempt_store(store))
    except KeyboardInterrupt:
        if not ranks:
            raise
        ranks[0].process.send_signal(signal.SIGINT)
        exit_code = ranks[0].exit_code if _has_ended(ranks[0].process, _GRACE_S) else None
        if exit_code is None:
            raise
        return exit_code
    finally:
        _end([rank.process for rank in ranks])
        for rank in ranks:
            rank.record.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    rank: int, num_ranks: int, port: int, arguments: Sequence[str], environment: Mapping[str, str]
) -> _Rank:
    record = StatusRecord.create()
    own = {
        RECORD_VARIABLE: record.descriptor,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": port,
        # torch and torch_xla then expect the store to be served already, as by torchrun.
        "TORCHELASTIC_RUN_ID": "mm2",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "neuron", *arguments],
        env={
            "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // num_ranks)),
            **environment,
            **{name: str(value) for name, value in own.items()},
        },
        stdin=subprocess.DEVNULL,
        # Only this process gets a Ctrl-C, and passes it to rank 0: otherwise each rank would report the others.
        start_new_session=True,
        pass_fds=(record.descriptor,),
    )
    return _Rank(process=process, record=record)


def _wait(ranks: Sequence[_Rank], store: Any) -> int:
    ended: set[int] = set()
    while True:
        for number, rank in enumerate(ranks):
            if number > 0 and number not in ended and rank.exit_code == 0:
                ended.add(number)
                record_end(store, number)
        failures = {number: text for number, rank in enumerate(ranks) if (text := rank.failure())}
        # All ranks of a layer wait for one that hangs, and are overdue with it.
        failed = min(failures, key=lambda number: (ranks[number].is_waiting, number), default=None)
        if failed:
            # A rank other than 0 failed: rank 0 learns of it here, and reports it.
            RankFailure(rank=failed, text=failures[failed]).record(store)
            _has_ended(ranks[0].process, _GRACE_S)
        exit_code = ranks[0].exit_code
        if exit_code is not None:
            # Rank 0 has ended, so the exit codes of the other ranks no longer matter.
            for rank in ranks[1:]:
                _has_ended(rank.process, _GRACE_S)
            return exit_code
        if failed is not None:
            # Rank 0 may be about to report the same.
            ranks[0].process.kill()
            ranks[0].process.wait()
            discard_output()
            cause = RankFailure(rank=failed, text=failures[failed]).record(store)
            raise RankFailedError(f"rank {cause.rank}", cause.text, next_step=RESUME)
        time.sleep(_POLL_S)


def _has_ended(process: subprocess.Popen[bytes], patience_s: float) -> bool:
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run."""
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        if not _has_ended(process, _GRACE_S):
            process.kill()
            process.wait()


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt

"""Launch: mm2 starts the ranks of a run as processes of itself, and ends all where one of them ends.

torchrun does as well, but for its exit code: here it is that of rank 0, or of the rank that failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed

from minimax_tools.errors import CannotRunError
from neuron.devices.crew import attempt_store, leave_word, tell_end

_HOST = "127.0.0.1"
# What ends a process, and must end its ranks with it, which are in sessions of their own.
_STOPPING = (signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.05
# How long rank 0 has to say why the run ended, and the others to end, before they are ended.
_GRACE_S = 5.0


def launch_ranks(
    num_ranks: int, arguments: Sequence[str], *, environment: Mapping[str, str] = os.environ
) -> int:
    """Run `python -m neuron ARGUMENTS` as so many ranks, and wait for them.

    Args:
        num_ranks: How many.
        arguments: Of the command, without its name.
        environment: What they get, beside their ranks' variables.

    Returns:
        The exit code of rank 0.

    Raises:
        CannotRunError: A rank died, and rank 0 could not tell of it.
    """
    # The store is this process's: it outlives every rank, and no other process can take its port.
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # not in its __all__
        _HOST, 0, is_master=True, wait_for_workers=False
    )
    before = {number: signal.signal(number, _interrupt) for number in _STOPPING}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            ranks.append(_start(rank, num_ranks, store.port, arguments, environment))
        return _wait(ranks, attempt_store(store))
    except KeyboardInterrupt:
        if not ranks:
            raise
        ranks[0].send_signal(signal.SIGINT)
        if not _has_ended(ranks[0], _GRACE_S) or ranks[0].returncode < 0:
            raise
        return ranks[0].returncode
    finally:
        _end(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    rank: int, num_ranks: int, port: int, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": port,
        # torch and torch_xla then take the ranks for torchrun's: the store is there already.
        "TORCHELASTIC_RUN_ID": "mm2",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "neuron", *arguments],
        env={
            "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // num_ranks)),
            **environment,
            **{name: str(value) for name, value in own.items()},
        },
        stdin=subprocess.DEVNULL,
        # Of a Ctrl-C this process alone hears, and tells rank 0: all at once would each complain of the others.
        start_new_session=True,
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], store: Any) -> int:
    ended: set[int] = set()
    while True:
        for rank, process in enumerate(ranks):
            if rank > 0 and rank not in ended and process.poll() == 0:
                ended.add(rank)
                tell_end(store, rank)
        failed = next((rank for rank, process in enumerate(ranks) if process.poll()), None)
        if failed:
            _tell_of(failed, ranks[failed], store)
            _has_ended(ranks[0], _GRACE_S)
        code = ranks[0].poll()
        if code is not None and code >= 0:
            # Dismissed or not, the others have nothing to add.
            for process in ranks[1:]:
                _has_ended(process, _GRACE_S)
            return code
        if failed is not None:
            cause = _tell_of(failed, ranks[failed], store)
            raise CannotRunError(
                f"rank {cause['rank']} of {len(ranks)} failed: {cause['text']}",
                next_step="Run the same command again: it resumes after the layers that are stored.",
            )
        time.sleep(_POLL_S)


def _tell_of(rank: int, process: subprocess.Popen[bytes], store: Any) -> dict[str, Any]:
    """Leave word of a rank that ended, where it did not itself: whoever failed first, and its text."""
    code = process.returncode
    text = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
    return leave_word(store, {"rank": rank, "text": text})


def _has_ended(process: subprocess.Popen[bytes], patience_s: float) -> bool:
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all that still run."""
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        if not _has_ended(process, _GRACE_S):
            process.kill()
            process.wait()


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt

"""Handshake: the meeting of the ranks of one attempt.

torchrun keeps its store when it starts the ranks anew (`--max-restarts`), so values of an earlier attempt may still be
there. Therefore:

1. Every rank writes a hello with an id that no other process has.
2. Rank 0 answers with all hellos it sees, and a name for the attempt.
3. A rank takes only an answer that holds its own id, and sets its status under the attempt's name.
4. When rank 0 sees every status, it writes the final list, and all return.

All later keys of the ranks begin with the attempt's name.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

from minimax_tools.errors import CannotRunError
from minimax_tools.json_codec import decode, encode
from minimax_tools.ranks.process import Process
from minimax_tools.ranks.rank_place import RankPlace
from minimax_tools.ranks.watch import ALIVE, status_key

_POLL_S = 0.02
# torchrun starts all ranks at about the same time. Importing torch may delay some.
ARRIVAL_S = 300.0
_ANSWER_KEY, _MET_KEY = "answer", "met"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The ranks of an attempt, all present.

    Args:
        attempt: The attempt's name.
        processes: The ranks' processes, in rank order.
    """

    attempt: str
    processes: tuple[Process, ...]


def meet(store: Any, place: RankPlace, *, patience_s: float = ARRIVAL_S) -> Meeting:
    """Meet the other ranks.

    Args:
        store: The torch.distributed store.
        place: This rank's number, and the number of ranks.
        patience_s: Longest wait for the others, in seconds.

    Raises:
        CannotRunError: A rank did not come in time.
    """
    own = {"id": uuid.uuid4().hex, **encode(Process.current())}
    store.set(_hello_key(place.rank), json.dumps(own))
    deadline = time.monotonic() + patience_s
    if place.rank == 0:
        return _answer_hellos(store, place.num_ranks, deadline, f"within {patience_s:.0f} s")
    return _wait_for_answer(store, place.rank, own, deadline, f"within {patience_s:.0f} s")


def _answer_hellos(store: Any, num_ranks: int, deadline: float, within: str) -> Meeting:
    attempt = uuid.uuid4().hex
    hellos: list[Any] = []
    missing = list(range(1, num_ranks))
    while missing:
        # Read again: a hello may be from the rank's earlier attempt, until the rank writes a new one.
        found = [_read(store, _hello_key(rank)) for rank in range(num_ranks)]
        if found != hellos:
            hellos = found
            store.set(_ANSWER_KEY, json.dumps({"attempt": attempt, "hellos": hellos}))
        missing = [rank for rank in missing if not store.check([f"{attempt}/{status_key(rank)}"])]
        if missing and time.monotonic() > deadline:
            names = ", ".join(f"rank {rank}" for rank in missing)
            raise CannotRunError(
                f"{names} did not come {within}",
                next_step="Look for the error of each above, or in the log of its machine.",
            )
        time.sleep(_POLL_S)
    store.set(f"{attempt}/{status_key(0)}", ALIVE)
    store.set(f"{attempt}/{_MET_KEY}", json.dumps(hellos))
    return _meeting(attempt, hellos)


def _wait_for_answer(store: Any, rank: int, own: dict[str, Any], deadline: float, within: str) -> Meeting:
    attempt = None
    while time.monotonic() < deadline:
        answer = _read(store, _ANSWER_KEY)
        if attempt is None and answer is not None and own in answer["hellos"]:
            attempt = answer["attempt"]
            store.set(f"{attempt}/{status_key(rank)}", ALIVE)
        hellos = None if attempt is None else _read(store, f"{attempt}/{_MET_KEY}")
        if attempt is not None and hellos is not None:
            return _meeting(attempt, hellos)
        time.sleep(_POLL_S)
    raise CannotRunError(
        f"rank {rank} got no answer from rank 0 {within}",
        next_step="Look for the error of rank 0, or of a rank that did not come.",
    )


def _meeting(attempt: str, hellos: list[Any]) -> Meeting:
    return Meeting(attempt=attempt, processes=decode(tuple[Process, ...], hellos))


def _hello_key(rank: int) -> str:
    return f"hello/{rank}"


def _read(store: Any, key: str) -> Any:
    """Read a key's value; None where it has none."""
    return json.loads(store.get(key)) if store.check([key]) else None

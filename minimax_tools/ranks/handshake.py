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
from minimax_tools.ranks.rank_place import RankPlace
from minimax_tools.ranks.watch import ALIVE, Process, status_key

# Time between two looks into the store, in seconds.
_POLL_S = 0.02
# Longest wait for the other ranks, in seconds. torchrun starts all ranks at about the same time; importing torch may
# delay some.
ARRIVAL_S = 300.0
_ANSWER_KEY, _MET_KEY = "answer", "met"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The attempt's name, and the processes of its ranks in rank order."""

    attempt: str
    processes: tuple[Process, ...]


def meet(store: Any, place: RankPlace, *, patience_s: float = ARRIVAL_S) -> Meeting:
    """Meet the other ranks in torch.distributed's store. Wait for them at most `patience_s` seconds.

    Raises:
        CannotRunError: A rank did not come in time.
    """
    hello = {"id": uuid.uuid4().hex, **encode(Process.current())}
    store.set(_hello_key(place.rank), json.dumps(hello))
    if place.rank == 0:
        return _answer_hellos(store, place.num_ranks, patience_s)
    return _wait_for_answer(store, place.rank, hello, patience_s)


def _answer_hellos(store: Any, num_ranks: int, patience_s: float) -> Meeting:
    """Meet the other ranks, as rank 0."""
    deadline = time.monotonic() + patience_s
    attempt = uuid.uuid4().hex
    hellos: list[Any] = []
    missing = list(range(1, num_ranks))
    while missing:
        # Read in every round: until a rank writes its hello, the store may hold that of its earlier attempt.
        current_hellos = [_read(store, _hello_key(rank)) for rank in range(num_ranks)]
        if current_hellos != hellos:
            hellos = current_hellos
            store.set(_ANSWER_KEY, json.dumps({"attempt": attempt, "hellos": hellos}))
        missing = [rank for rank in missing if not store.check([f"{attempt}/{status_key(rank)}"])]
        if missing and time.monotonic() > deadline:
            names = ", ".join(f"rank {rank}" for rank in missing)
            raise CannotRunError(
                f"{names} did not come within {patience_s:.0f} s",
                next_step="Look for the error of each above, or in the log of its machine.",
            )
        time.sleep(_POLL_S)
    store.set(f"{attempt}/{status_key(0)}", ALIVE)
    store.set(f"{attempt}/{_MET_KEY}", json.dumps(hellos))
    return _meeting(attempt, hellos)


def _wait_for_answer(store: Any, rank: int, hello: dict[str, Any], patience_s: float) -> Meeting:
    """Meet the other ranks, as a rank other than 0."""
    deadline = time.monotonic() + patience_s
    attempt = None
    while time.monotonic() < deadline:
        if attempt is None:
            answer = _read(store, _ANSWER_KEY)
            # An answer without this hello is from an earlier attempt, or came before the hello.
            if answer is not None and hello in answer["hellos"]:
                attempt = answer["attempt"]
                store.set(f"{attempt}/{status_key(rank)}", ALIVE)
        else:
            hellos = _read(store, f"{attempt}/{_MET_KEY}")
            if hellos is not None:
                return _meeting(attempt, hellos)
        time.sleep(_POLL_S)
    raise CannotRunError(
        f"rank {rank} got no answer from rank 0 within {patience_s:.0f} s",
        next_step="Look for the error of rank 0, or of a rank that did not come.",
    )


def _meeting(attempt: str, hellos: list[Any]) -> Meeting:
    return Meeting(attempt=attempt, processes=decode(tuple[Process, ...], hellos))


def _hello_key(rank: int) -> str:
    return f"hello/{rank}"


def _read(store: Any, key: str) -> Any:
    """Read a key's value; None if it has none."""
    return json.loads(store.get(key)) if store.check([key]) else None

"""Handshake: how the ranks of one attempt meet in a store that may still hold what an attempt before it left.

torchrun keeps its store when it starts the ranks anew (`--max-restarts`). So every rank says hello with an id that no
other process has, rank 0 answers with the ids it saw and a name for the attempt, and a rank takes no answer that does
not hold its own. Whatever the ranks say afterwards stands under the attempt's name.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

from gpu_reference.ranks.process import Process
from gpu_reference.ranks.rank_place import RankPlace
from gpu_reference.ranks.watch import ALIVE, status_key
from minimax_tools.errors import CannotRunError
from minimax_tools.json_codec import decode, encode

_POLL_S = 0.02
# torchrun starts the ranks of all machines together; what lies between is the import of torch.
ARRIVAL_S = 300.0
_ANSWER_KEY, _MET_KEY = "answer", "met"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The ranks of an attempt that met.

    Args:
        nonce: The attempt's name.
        processes: Those of all ranks, in order.
    """

    nonce: str
    processes: tuple[Process, ...]


def meet(store: Any, place: RankPlace, *, patience_s: float = ARRIVAL_S) -> Meeting:
    """Meet the other ranks.

    Args:
        store: torch.distributed's.
        place: This rank's.
        patience_s: How long to wait for the others.

    Raises:
        CannotRunError: Somebody did not come.
    """
    own = {"id": uuid.uuid4().hex, **encode(Process.current())}
    store.set(_hello_key(place.rank), json.dumps(own))
    deadline = time.monotonic() + patience_s
    if place.rank == 0:
        return _gather(store, place.num_ranks, deadline, f"within {patience_s:.0f} s")
    return _answer(store, place.rank, own, deadline, f"within {patience_s:.0f} s")


def _gather(store: Any, num_ranks: int, deadline: float, in_time: str) -> Meeting:
    nonce = uuid.uuid4().hex
    hellos: list[Any] = []
    missing = list(range(1, num_ranks))
    while missing:
        # Looked at again until their owners answer: a rank's hello may be that of its last attempt.
        found = [_read(store, _hello_key(rank)) for rank in range(num_ranks)]
        if found != hellos:
            hellos = found
            store.set(_ANSWER_KEY, json.dumps({"nonce": nonce, "hellos": hellos}))
        missing = [rank for rank in missing if not store.check([f"{nonce}/{status_key(rank)}"])]
        if time.monotonic() > deadline:
            names = ", ".join(f"rank {rank}" for rank in missing)
            raise CannotRunError(
                f"{names} did not come {in_time}",
                next_step="Look for its own error above, or in the log of its machine.",
            )
        time.sleep(_POLL_S)
    store.set(f"{nonce}/{status_key(0)}", ALIVE)
    store.set(f"{nonce}/{_MET_KEY}", json.dumps(hellos))
    return _meeting(nonce, hellos)


def _answer(store: Any, rank: int, own: dict[str, Any], deadline: float, in_time: str) -> Meeting:
    nonce = None
    while time.monotonic() < deadline:
        answer = _read(store, _ANSWER_KEY)
        if nonce is None and answer is not None and own in answer["hellos"]:
            nonce = answer["nonce"]
            store.set(f"{nonce}/{status_key(rank)}", ALIVE)
        hellos = None if nonce is None else _read(store, f"{nonce}/{_MET_KEY}")
        if nonce is not None and hellos is not None:
            return _meeting(nonce, hellos)
        time.sleep(_POLL_S)
    raise CannotRunError(
        f"rank {rank} was not called by rank 0 {in_time}",
        next_step="Look for the error of rank 0, or of a rank that did not come.",
    )


def _meeting(nonce: str, hellos: list[Any]) -> Meeting:
    return Meeting(nonce=nonce, processes=decode(tuple[Process, ...], hellos))


def _hello_key(rank: int) -> str:
    return f"hello/{rank}"


def _read(store: Any, key: str) -> Any:
    """A value, or None where there is none."""
    return json.loads(store.get(key)) if store.check([key]) else None

"""RankPlace: which rank of a run this process is, and whether it has the threads that its cores allow."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank this process is, as torchrun's environment says; the only one where nothing says.

    Args:
        rank: Its number, from 0.
        num_ranks: How many there are.
        local_rank: Its number among those of this machine.
        num_local: How many this machine has.
    """

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


def warn_of_idle_cores(place: RankPlace) -> None:
    """Tell, on rank 0, of ranks that compute with one thread each while cores are idle."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = num_cores // place.num_local
    if (
        place.rank == 0
        and place.num_ranks > 1
        and os.environ.get("OMP_NUM_THREADS") == "1"
        and num_threads > 1
    ):
        logger.warning(
            "OMP_NUM_THREADS is 1, as torchrun sets it where nothing else is said: each of %d ranks here computes "
            "with one of %d cores. Set it to %d. A capture resumes only with what it was begun with.",
            place.num_local,
            num_cores,
            num_threads,
        )

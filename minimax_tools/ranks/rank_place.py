"""RankPlace: this process's rank among those of a run, as torchrun's environment variables say."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from minimax_tools.errors import UsageError

logger = logging.getLogger(__name__)


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

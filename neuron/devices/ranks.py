"""Ranks: the processes that share a layer, and the part of it that each holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed

from minimax_tools.errors import UsageError
from minimax_tools.ranks.rank_group import RankPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that share a layer, as one of them sees them.

    The whole process group is one tensor-parallel group. If experts are divided too, a group of consecutive ranks holds
    the same experts, and each rank a part of every one.
    """

    rank: int = 0  # this rank, from 0
    degree: int = 1  # the number of ranks. Heads and the experts' intermediate size are divided among them.
    expert_degree: int = 1  # the number of groups of ranks that the experts are divided among
    reduce_dtype: torch.dtype = torch.float32  # dtype in which partial sums are sent and added up

    def __post_init__(self) -> None:
        if self.degree < 1 or not 0 <= self.rank < self.degree:
            raise ValueError(
                f"rank {self.rank} of {self.degree}: expected a rank from 0 to {self.degree - 1}"
            )
        if self.expert_degree < 1 or self.degree % self.expert_degree:
            raise UsageError(
                f"{self.degree} ranks do not divide into {self.expert_degree} groups that each hold other experts",
                expected=f"an --ep-degree that divides {self.degree}",
                found=str(self.expert_degree),
            )

    @property
    def is_lead(self) -> bool:
        """True for rank 0, which reads the golden, writes the capture and prints."""
        return self.rank == 0

    @property
    def are_several(self) -> bool:
        """True if there is more than one rank."""
        return self.degree > 1

    @property
    def ranks_per_expert(self) -> int:
        """The number of ranks that hold a part of the same expert."""
        return self.degree // self.expert_degree

    @property
    def expert_group(self) -> int:
        """The index of the group of experts that this rank holds."""
        return self.rank // self.ranks_per_expert

    @property
    def expert_part(self) -> int:
        """The index of the part that this rank holds of each of its experts."""
        return self.rank % self.ranks_per_expert

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in its own dtype; the tensor may be overwritten."""
        if self.are_several:
            torch.distributed.all_reduce(tensor)
        return tensor

    def reduce(self, partial_sum: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """Sum the ranks' partial sums in `reduce_dtype`, and round the result to `dtype`."""
        if not self.are_several:
            return partial_sum.to(dtype)
        return self.add_up(partial_sum.to(self.reduce_dtype)).to(dtype)

    def as_json(self) -> dict[str, int | str]:
        """Return the options that change numbers, by name; {} for a single rank."""
        if not self.are_several:
            return {}
        return {
            "tp_degree": self.degree,
            "ep_degree": self.expert_degree,
            "reduce_dtype": str(self.reduce_dtype).removeprefix("torch."),
        }


def read_ranks(
    tp_degree: int | None,
    *,
    ep_degree: int,
    reduce_dtype: torch.dtype,
    environment: Mapping[str, str] = os.environ,
) -> Ranks:
    """Read the ranks from the options and torchrun's variables; None for `tp_degree` takes all that were launched.

    Raises:
        UsageError: The number of ranks launched is not --tp-degree, or they do not divide into the groups.
    """
    place = RankPlace.from_environment(environment)
    degree = place.num_ranks if tp_degree is None else tp_degree
    if place.num_ranks not in (1, degree):
        raise UsageError(
            f"{place.num_ranks} ranks were launched, and --tp-degree asks for {degree}",
            expected=f"WORLD_SIZE={degree}",
            found=f"WORLD_SIZE={place.num_ranks}",
            next_step=f"Start torchrun --nproc-per-node {degree} -m neuron …, or mm2-test … --tp-degree {degree} "
            "without torchrun.",
        )
    return Ranks(rank=place.rank, degree=degree, expert_degree=ep_degree, reduce_dtype=reduce_dtype)

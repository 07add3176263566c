"""Ranks: the processes that share a layer, as one of them sees them, and how much of it each holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed

from minimax_tools.errors import UsageError

_LAUNCH = "Start torchrun --nproc-per-node {degree} -m neuron …, or mm2-test … --tp-degree {degree} without torchrun."


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which rank this is, of how many, and how they share a layer.

    The whole process group is one tensor-parallel group. Where experts are spread too, consecutive ranks share the
    same experts, and divide these between them.

    Args:
        rank: This one, from 0.
        degree: How many there are: heads and the experts' intermediate size are divided among them.
        expert_degree: Into how many groups of ranks the experts are divided.
        reduce_dtype: In which partial sums are sent and added up.
    """

    rank: int = 0
    degree: int = 1
    expert_degree: int = 1
    reduce_dtype: torch.dtype = torch.float32

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
        """Whether this one reads the golden, writes the capture and prints."""
        return self.rank == 0

    @property
    def are_several(self) -> bool:
        """Whether there are others."""
        return self.degree > 1

    @property
    def ranks_per_expert(self) -> int:
        """How many ranks hold a part of the same expert."""
        return self.degree // self.expert_degree

    @property
    def expert_group(self) -> int:
        """Which group of experts this rank holds."""
        return self.rank // self.ranks_per_expert

    @property
    def expert_part(self) -> int:
        """Which part of each of its experts this rank holds."""
        return self.rank % self.ranks_per_expert

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in the tensor's own dtype; the tensor may be overwritten."""
        if self.are_several:
            torch.distributed.all_reduce(tensor)
        return tensor

    def reduce(self, partial_sum: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """The sum over all ranks of what each has a part of, sent in `reduce_dtype` and rounded to `dtype`."""
        if not self.are_several:
            return partial_sum.to(dtype)
        return self.add_up(partial_sum.to(self.reduce_dtype)).to(dtype)

    def as_json(self) -> dict[str, int | str]:
        """What of it changes numbers; nothing for one alone."""
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
    """What the options and torchrun's variables say together.

    Args:
        tp_degree: How many ranks share a layer; None for as many as were launched.
        ep_degree: Into how many groups the experts are divided.
        reduce_dtype: In which partial sums are added up.
        environment: Where torchrun's variables stand.

    Raises:
        UsageError: The ranks that were launched are not those that were asked for, or do not divide.
    """
    world_size = int(environment.get("WORLD_SIZE") or 1)
    degree = world_size if tp_degree is None else tp_degree
    if world_size not in (1, degree):
        raise UsageError(
            f"{world_size} ranks were launched, and --tp-degree asks for {degree}: {_consequence(world_size, degree)}",
            expected=f"WORLD_SIZE={degree}",
            found=f"WORLD_SIZE={world_size}",
            next_step=_LAUNCH.format(degree=degree),
        )
    rank = int(environment.get("RANK") or 0) if world_size > 1 else 0
    return Ranks(rank=rank, degree=degree, expert_degree=ep_degree, reduce_dtype=reduce_dtype)


def _consequence(world_size: int, degree: int) -> str:
    if world_size < degree:
        return "neuronx_distributed would take fewer without a word"
    if world_size % degree:
        return "they do not divide into such groups"
    return f"{world_size // degree} copies of the run would write to one capture"

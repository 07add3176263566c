"""Stand-in for vllm/distributed/parallel_state.py: the tensor-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist

GROUPS = {}


class GroupCoordinator:
    """A group of ranks."""

    def __init__(self, ranks, rank):
        self.world_size, self.rank_in_group = len(ranks), ranks.index(rank)
        self.device_group = dist.group.WORLD

    def all_reduce(self, tensor):
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor, dim):
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, tensor, dim):
        return self.all_reduce(tensor).chunk(self.world_size, dim=dim)[self.rank_in_group]


def get_tp_group():
    """Return the tensor-parallel group; vLLM refuses the call before it is initialised."""
    assert "tp" in GROUPS, "tensor model parallel group is not initialized"
    return GROUPS["tp"]


def open_group(ranks, rank):
    """Initialise the group."""
    GROUPS["tp"] = GroupCoordinator(ranks, rank)

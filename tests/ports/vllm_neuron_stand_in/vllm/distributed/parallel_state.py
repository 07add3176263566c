"""Stand-in for vllm/distributed/parallel_state.py: the tensor-parallel group."""

from __future__ import annotations

from types import SimpleNamespace

GROUPS = {}


def get_tp_group():
    """Return the tensor-parallel group; vLLM refuses the call before it is initialised."""
    assert "tp" in GROUPS, "tensor model parallel group is not initialized"
    return GROUPS["tp"]


def open_group(ranks, rank):
    """Initialise the group."""
    GROUPS["tp"] = SimpleNamespace(
        world_size=len(ranks), rank_in_group=ranks.index(rank), device_group="the group"
    )

"""Stand-in for vllm_neuron/parallel/neuron_parallel_state.py: the path that the plugin's own tests take."""

from __future__ import annotations

import torch.distributed
from vllm.distributed import parallel_state


def is_initialized():
    """Decide whether the groups are open."""
    return bool(parallel_state.GROUPS)


def initialize_neuron_parallel_state(*, tp_global_ranks=None, local_rank=None, **degrees):
    """Open the groups on a process group that is open."""
    assert torch.distributed.is_initialized(), "Default process group has not been initialized"
    assert not degrees, degrees
    parallel_state.open_group(tp_global_ranks, local_rank)

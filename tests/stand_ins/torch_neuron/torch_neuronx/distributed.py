"""The backend `neuron` of torch.distributed: adds up the device's tensors through gloo, on the host.

Like TorchNeuron's, it is a ProcessGroup written in Python, for tensors of the device alone.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class NeuronGroup(dist.ProcessGroup):
    """The ranks, each with a device of its own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "neuron"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        for tensor in tensors:
            if tensor.device.type != "neuron":
                raise RuntimeError(f"expected a tensor on neuron, found {tensor.device}")
            host = tensor.cpu()
            self._gloo.allreduce([host], options or dist.AllreduceOptions()).wait()
            tensor.copy_(host)
        future = torch.futures.Future()
        future.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(future)


def register() -> None:
    """Give the backend to torch.distributed."""
    dist.Backend.register_backend("neuron", NeuronGroup, devices=["neuron"])

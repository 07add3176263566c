"""Spmd: one process that computes on several XLA devices; weights are marked, and XLA inserts what they exchange.

This is how XLA on the CPU shares a layer: collectives between processes cannot be trusted there. The layer's code stays
that of a whole layer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from minimax_tools.errors import BackendError, UsageError
from neuron.devices.ranks import Ranks

logger = logging.getLogger(__name__)

_CPU_NUM_DEVICES = "CPU_NUM_DEVICES"
# The axes of the mesh, by which a layer's `shardings` name them.
EXPERT_AXIS, TENSOR_AXIS = "expert", "tensor"
# For each dim of a weight the axis along which it is divided, or several; None for a dim that is not.
Axes = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spmd:
    """The devices of this process, as a mesh of expert groups by devices in each.

    Args:
        sharing: Into how many parts a layer is divided; of them this process is all.
    """

    sharing: Ranks

    def as_json(self) -> dict[str, int | str]:
        """What of it changes numbers; in which dtype sums are made is XLA's choice."""
        return {"tp_degree": self.sharing.degree, "ep_degree": self.sharing.expert_degree}

    def shard(self, module: nn.Module, *, what: str) -> None:
        """Mark a loaded module's weights as its `shardings` say: by name, for each dim an axis or several, or None.

        A module without stays whole on every device, unless it marks its weights itself; that is logged.

        Args:
            module: On the device.
            what: The module in words.
        """
        shardings: Mapping[str, Axes] | None = getattr(module, "shardings", None)
        if shardings is None:
            logger.warning(
                "%s has no `shardings`: each of %d devices computes all of it, unless it marks its weights itself.",
                what,
                self.sharing.degree,
            )
            return
        from torch_xla.distributed.spmd.xla_sharding import Mesh, mark_sharding

        mesh = Mesh(
            list(range(self.sharing.degree)),
            (self.sharing.expert_degree, self.sharing.ranks_per_expert),
            (EXPERT_AXIS, TENSOR_AXIS),
        )
        tensors = module.state_dict(keep_vars=True)
        for name, axes in shardings.items():
            mark_sharding(tensors[name], mesh, axes)


def open_spmd(sharing: Ranks) -> Spmd:
    """Have XLA on the CPU show so many devices; before torch_xla is used in this process.

    Raises:
        BackendError: XLA shows another number of devices.
        UsageError: Sums are to be reduced in another dtype than XLA's own choice.
    """
    if sharing.reduce_dtype != torch.float32:
        raise UsageError(
            "--reduce-dtype says nothing on xla-cpu: there XLA adds up, in the dtype of what it adds",
            next_step="Leave it out, or run with --backend cpu, where the ranks are processes.",
        )
    # XLA tells on every compile that its partitioner will be replaced one day.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ[_CPU_NUM_DEVICES] = str(sharing.degree)
    os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla.runtime

    torch_xla.runtime.use_spmd()
    found = torch_xla.runtime.global_runtime_device_count()
    if found != sharing.degree:
        raise BackendError(
            "XLA on the CPU shows another number of devices",
            expected=str(sharing.degree),
            found=str(found),
            next_step="Start mm2-test in a process of its own: torch_xla counts devices once.",
        )
    return Spmd(sharing=sharing)

"""Spmd: one process that computes on several XLA devices.

SPMD stands for single program, multiple data. Each weight is marked with the way it is divided, and XLA inserts the
collectives; the layer's code stays that of a whole layer. XLA on the CPU shares a layer this way, because its
collectives between processes are wrong.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from minimax_tools.errors import BackendError, TargetError, UsageError, list_names
from neuron.devices.ranks import Ranks

logger = logging.getLogger(__name__)

_CPU_NUM_DEVICES = "CPU_NUM_DEVICES"
_NUM_NAMES_SHOWN = 4
# Names of the mesh's axes in a layer's `shardings`: the groups of experts, and the devices within a group.
EXPERT_AXIS, TENSOR_AXIS = "expert", "tensor"
# For each dim of a weight, the axis or axes that divide it; None for an undivided dim. So ("tensor", None) divides the
# rows of a matrix among the devices of each group.
Axes = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spmd:
    """The devices of this process, as a mesh: a row of devices for each group of experts."""

    sharing: Ranks  # the division of a layer that the options ask for; each device stands for one rank

    def as_json(self) -> dict[str, int | str]:
        """Return the options that change the results, for the manifest. `reduce_dtype` has no effect here."""
        return {"tp_degree": self.sharing.degree, "ep_degree": self.sharing.expert_degree}

    def mark_division(self, module: nn.Module, *, what: str) -> None:
        """Mark each weight that the module's `shardings` names as divided over these axes of the mesh.

        Without the attribute, the module stays whole on every device, and a warning names it by `what`.
        """
        shardings: Mapping[str, Axes] | None = getattr(module, "shardings", None)
        if shardings is None:
            logger.warning(
                "%s has no `shardings`: each of %d devices computes all of it, unless it marks its weights itself.",
                what,
                self.sharing.degree,
            )
            return
        tensors = module.state_dict(keep_vars=True)
        unknown = [str(name) for name in shardings if name not in tensors]
        if unknown:
            raise TargetError(
                f"{what}: `shardings` names weights that the module does not have",
                expected="names of its state_dict()",
                found=list_names(unknown, most=_NUM_NAMES_SHOWN),
                next_step="Correct the port's `shardings`.",
            )
        from torch_xla.distributed.spmd.xla_sharding import Mesh, mark_sharding

        mesh = Mesh(
            list(range(self.sharing.degree)),
            (self.sharing.expert_degree, self.sharing.ranks_per_expert),
            (EXPERT_AXIS, TENSOR_AXIS),
        )
        for name, axes in shardings.items():
            mark_sharding(tensors[name], mesh, axes)


def open_spmd(sharing: Ranks) -> Spmd:
    """Make XLA on the CPU show one device for each rank of `sharing`. Call it before torch_xla is used."""
    # Not the default, so the user asked for it.
    if sharing.reduce_dtype != torch.float32:
        raise UsageError(
            "--reduce-dtype has no effect on xla-cpu: XLA adds up in the dtype of the summands",
            next_step="Leave it out, or run with --backend cpu, where the ranks are processes.",
        )
    # Silence XLA's warnings: on every compile it says that its partitioner will be replaced one day.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ[_CPU_NUM_DEVICES] = str(sharing.degree)
    os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla.runtime

    torch_xla.runtime.use_spmd()
    num_devices = torch_xla.runtime.global_runtime_device_count()
    if num_devices != sharing.degree:
        raise BackendError(
            "XLA on the CPU shows another number of devices",
            expected=str(sharing.degree),
            found=str(num_devices),
            next_step="Start mm2-test in a process of its own: torch_xla counts devices once.",
        )
    return Spmd(sharing=sharing)

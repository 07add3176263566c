"""Layers of mm2 as targets, the values of --target: `builtin` for a device, `reference` in plain PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minimax_tools.errors import TargetError
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.layer import ReferenceLayer
from neuron.builtin.layer import DeviceLayer
from neuron.builtin.moe import CHUNK_SIZE_BYTES, experts_per_chunk
from neuron.devices.backend import Backend
from neuron.devices.ranks import Ranks
from neuron.ports.port_target import PortTarget
from neuron.ports.sources import TargetSource
from neuron.ports.target import target_config


class ResidentReference(ReferenceLayer):
    """The reference layer, built once without memory and reused for all layers."""

    reuse = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        # Random weights of a full-size layer would take a minute, only to be overwritten.
        with torch.device("meta"):
            super().__init__(config, layer_idx)


@dataclass(frozen=True, kw_only=True)
class BuiltinTarget(PortTarget):
    """mm2's layer for a device."""

    forms = "builtin"
    divides_weights = True  # of several ranks, each holds only its part of a layer

    factory: Callable[[Any, int], object] = DeviceLayer

    @classmethod
    def find(cls, name: str) -> BuiltinTarget | None:
        """Return the target if --target is `builtin`, else None."""
        return cls(name=name, source_digest=_digest_source(DeviceLayer)) if name == cls.forms else None

    def num_experts_at_once(
        self, spec: ModelSpec, *, dtype: torch.dtype, is_lazy: bool, ranks: Ranks | None = None
    ) -> int:
        """Return the number of experts that run together: those of a chunk, so that scratch memory stays small."""
        config = target_config(spec, ranks=ranks)
        return experts_per_chunk(config, dtype=dtype, chunk_size_bytes=CHUNK_SIZE_BYTES)

    def require_traceable(self, backend: Backend) -> None:
        """Raise TargetError for Neuron over torch_xla, where the layer is several graphs."""
        if backend is Backend.NEURON_XLA:
            raise TargetError(
                "the port builtin is several graphs on a lazy device, not one program",
                next_step="Trace a port of your own; builtin runs as it is.",
            )


@dataclass(frozen=True, kw_only=True)
class ReferenceTarget(PortTarget):
    """mm2's plain PyTorch layer."""

    forms = "reference"

    factory: Callable[[Any, int], object] = ResidentReference

    @classmethod
    def find(cls, name: str) -> ReferenceTarget | None:
        """Return the target if --target is `reference`, else None."""
        return cls(name=name, source_digest=_digest_source(ReferenceLayer)) if name == cls.forms else None

    def num_experts_at_once(
        self, spec: ModelSpec, *, dtype: torch.dtype, is_lazy: bool, ranks: Ranks | None = None
    ) -> int:
        """Return the number of experts that run together: all on a lazy device, where they are one graph; else 1."""
        return spec.num_local_experts if is_lazy else 1


def _digest_source(layer: type[nn.Module]) -> str:
    return TargetSource(place=layer.__name__, module=sys.modules[layer.__module__]).digest()

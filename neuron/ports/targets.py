"""The kinds of ports, and the search for the one of a --target.

`PATH.py:NAME` and `package.module:NAME` are a port's own class or function; `builtin` is mm2's layer for a device,
`reference` its layer in plain PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from minimax_tools.errors import TargetError, UsageError, did_you_mean
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.layer import ReferenceLayer
from neuron.builtin.layer import DeviceLayer
from neuron.builtin.moe import CHUNK_SIZE_BYTES, experts_per_chunk
from neuron.devices.backend import Backend
from neuron.devices.ranks import Ranks
from neuron.devices.weights import reads_in_place
from neuron.ports.nxdi import NxdiTarget
from neuron.ports.nxdi_model import NxdiModelTarget
from neuron.ports.sources import ImportedPort, TargetSource
from neuron.ports.target import ModelTarget, Target, target_config
from neuron.ports.traced import TracedTarget
from neuron.ports.vllm_neuron_model import VllmNeuronModelTarget

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class PortTarget(ImportedPort, Target):
    """A class or function that is called as `factory(config, layer_idx)` and returns a module."""

    forms = "PATH.py:NAME or package.module:NAME"

    def make(self, config: Any, layer_idx: int) -> object:
        """Call the port's factory."""
        return self.factory(config, layer_idx)

    @property
    def is_reused(self) -> bool:
        """True if the factory sets `reuse`."""
        return bool(getattr(self.factory, "reuse", False))

    @property
    def adds_over_ranks(self) -> bool:
        """True if the module adds up its ranks' partial sums: mm2's device layer and classes derived from it do."""
        return isinstance(self.factory, type) and issubclass(self.factory, DeviceLayer)

    @property
    def fills_storage(self) -> bool:
        """True if the module's parameters are known to be filled from the checkpoint, with no second layer in memory.

        So it is for a class without `convert_state_dict`, or with one that is marked by `read_in_place`. Nobody knows
        what a function builds.
        """
        convert = getattr(self.factory, "convert_state_dict", None)
        return isinstance(self.factory, type) and (convert is None or reads_in_place(convert))

    @property
    def may_convert(self) -> bool:
        """False for a class without `convert_state_dict`; an object that a function builds may have one."""
        return not isinstance(self.factory, type) or hasattr(self.factory, "convert_state_dict")


@dataclass(frozen=True, kw_only=True)
class PortModelTarget(ImportedPort, ModelTarget):
    """A class or function that is called as `factory(config)` and returns a module."""

    forms = "PATH.py:NAME or package.module:NAME"

    def make(self, config: Any) -> object:
        """Call the port's factory."""
        return self.factory(config)


class ResidentReference(ReferenceLayer):
    """The reference layer, built once without memory and reused for all layers."""

    reuse = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        # Random weights of a full-size layer would take a minute, only to be overwritten.
        with torch.device("meta"):
            super().__init__(config, layer_idx)


@dataclass(frozen=True, kw_only=True)
class _OwnTarget(PortTarget):
    """A layer of mm2's, which `forms` names."""

    layer_class: ClassVar[type[nn.Module]] = DeviceLayer  # whose source is digested

    factory: Callable[..., Any] = DeviceLayer

    @classmethod
    def find(cls, name: str) -> Self | None:
        """Return the target if --target is its word, else None."""
        if name != cls.forms:
            return None
        layer_class = cls.layer_class
        source = TargetSource(place=layer_class.__name__, module=sys.modules[layer_class.__module__])
        return cls(name=name, source_digest=source.digest())


@dataclass(frozen=True, kw_only=True)
class BuiltinTarget(_OwnTarget):
    """mm2's layer for a device."""

    forms = "builtin"
    divides_weights = True  # of several ranks, each holds only its part of a layer

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
class ReferenceTarget(_OwnTarget):
    """mm2's plain PyTorch layer."""

    forms = "reference"
    layer_class = ReferenceLayer

    factory: Callable[..., Any] = ResidentReference

    def num_experts_at_once(
        self, spec: ModelSpec, *, dtype: torch.dtype, is_lazy: bool, ranks: Ranks | None = None
    ) -> int:
        """Return the number of experts that run together: all on a lazy device, where they are one graph; else 1."""
        return spec.num_local_experts if is_lazy else 1


# In the order of the search: a prefix such as `nxdi:` would be a module of PortTarget.
_KINDS: tuple[type[Target], ...] = (BuiltinTarget, ReferenceTarget, NxdiTarget, TracedTarget, PortTarget)
# Targets that are named by a word.
_NAMES = (BuiltinTarget.forms, ReferenceTarget.forms)
_MODEL_KINDS: tuple[type[ModelTarget], ...] = (NxdiModelTarget, VllmNeuronModelTarget, PortModelTarget)


def find_target(name: str) -> Target:
    """Find the target of a --target.

    Raises:
        UsageError: The name has none of the known forms.
    """
    target = next(filter(None, (kind.find(name) for kind in _KINDS)), None)
    if target is None:
        step = did_you_mean(name, _NAMES) or "Name what to call after a colon, as in port.py:DecoderLayer."
        forms = ", ".join(kind.forms for kind in _KINDS)
        raise UsageError(f"--target {name!r} is unknown", expected=forms, next_step=step)
    return target


def find_model_target(name: str) -> ModelTarget:
    """Find the whole port of a --target of `mm2-test model`; raise as `find_target` does."""
    target = next(filter(None, (kind.find(name) for kind in _MODEL_KINDS)), None)
    if target is None:
        raise UsageError(
            f"--target {name!r} is no whole port",
            expected=", ".join(kind.forms for kind in _MODEL_KINDS),
            next_step="Name what to call after a colon, as in port.py:Model.",
        )
    return target

"""A port's own class or function as a target: `PATH.py:NAME` or `package.module:NAME`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minimax_tools.errors import TargetError
from neuron.builtin.layer import DeviceLayer
from neuron.devices.weights import reads_in_place
from neuron.ports.nxdi_config import read_options
from neuron.ports.sources import import_callable
from neuron.ports.target import Target


@dataclass(frozen=True, kw_only=True)
class PortTarget(Target):
    """A class or function that is called as `factory(config, layer_idx)` and returns a module."""

    forms = "PATH.py:NAME or package.module:NAME"

    factory: Callable[[Any, int], object]

    def __post_init__(self) -> None:
        if self.build_dtype is not None and not isinstance(self.build_dtype, torch.dtype):
            raise TargetError(
                f"port {self.name}: build_dtype is no dtype",
                expected="a torch.dtype, such as torch.float32",
                found=repr(self.build_dtype),
            )

    @classmethod
    def find(cls, name: str) -> PortTarget | None:
        """Import the port's file or module; None if the name has another form."""
        found = import_callable(name)
        if found is None:
            return None
        source, factory = found
        return cls(name=name, factory=factory, source_digest=source.digest())

    def make(self, config: Any, layer_idx: int) -> object:
        """Call the port's factory."""
        return self.factory(config, layer_idx)

    @property
    def is_reused(self) -> bool:
        """True if the factory sets `reuse`."""
        return bool(getattr(self.factory, "reuse", False))

    @property
    def build_dtype(self) -> torch.dtype | None:
        """The default dtype under which the port wants its module built; None for the run's."""
        dtype: torch.dtype | None = getattr(self.factory, "build_dtype", None)
        return dtype

    @property
    def port_config(self) -> Mapping[str, Any]:
        """The options that the port declares for NxDI. mm2 records them, and reads none."""
        return read_options(self.factory, inspect.getmodule(self.factory))

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

    def _conversion(self, module: nn.Module) -> Any:
        # A function may build a class that its author cannot change: then the function has the conversion as attribute.
        return super()._conversion(module) or getattr(self.factory, "convert_state_dict", None)

"""Target: the port under test, found by name, built as the protocol says, and loaded.

`builtin` is mm2's device layer, `reference` its plain PyTorch layer; `PATH.py:NAME` and
`package.module:NAME` name a port's own. NAME is called as `NAME(config, layer_idx)`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.errors import TargetError
from minimax_tools.reference.layer import ReferenceLayer
from minimax_tools.spec import ModelSpec
from neuron.layer import DeviceLayer
from neuron.weights import Weight, WeightLoader

_OWN = {"builtin": DeviceLayer, "reference": ReferenceLayer}
_NOTATION = "builtin, reference, PATH.py:NAME or package.module:NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An implementation of a decoder layer.

    Args:
        name: How the user named it.
        factory: Called as `factory(config, layer_idx)`; returns a module.
        source_digest: sha256 of the source file it comes from.
    """

    name: str
    factory: Callable[[Any, int], nn.Module]
    source_digest: str

    @property
    def is_reused(self) -> bool:
        """Whether one module serves all layers, its weights swapped."""
        return bool(getattr(self.factory, "reuse", False))

    @property
    def build_dtype(self) -> torch.dtype | None:
        """The default dtype that the port wants to be built under; None for the run's."""
        dtype = getattr(self.factory, "build_dtype", None)
        return dtype if isinstance(dtype, torch.dtype) else None

    def build(self, spec: ModelSpec, layer: int, *, dtype: torch.dtype) -> nn.Module:
        """The module for one layer, on the CPU, its weights not loaded.

        Raises:
            TargetError: The port raised, or did not return a module.
        """
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.build_dtype or dtype)
        try:
            module = self.factory(target_config(spec), layer)
        except Exception as error:  # the port's own code: anything can come
            raise TargetError(
                f"target {self.name} cannot be built for layer {layer}",
                found=f"{type(error).__name__}: {error}",
                next_step="It is called as NAME(config, layer_idx); see --debug for the traceback.",
            ) from error
        finally:
            torch.set_default_dtype(default)
        if not isinstance(module, nn.Module):
            raise TargetError(
                f"target {self.name} returned no module", expected="torch.nn.Module", found=type(module).__name__
            )
        return module.eval()

    def load(
        self, module: nn.Module, tensors: LayerTensors, spec: ModelSpec, *, loader: WeightLoader
    ) -> None:
        """Load a layer's weights into `module` and move it to the loader's device.

        Raises:
            TargetError: The port's conversion raised, or its names or shapes do not fit.
        """
        what = f"target {self.name}, layer {tensors.layer}"
        loader.load(module, self._convert(module, tensors, spec, what=what), what=what)

    def _convert(
        self, module: nn.Module, tensors: LayerTensors, spec: ModelSpec, *, what: str
    ) -> Mapping[str, Weight]:
        convert = getattr(module, "convert_state_dict", None) or getattr(self.factory, "convert_state_dict", None)
        if convert is None:
            return tensors
        try:
            converted = convert(tensors, target_config(spec), tensors.layer)
        except Exception as error:  # the port's own code: anything can come
            raise TargetError(
                f"{what}: convert_state_dict failed",
                found=f"{type(error).__name__}: {error}",
                next_step="It gets the hub's names relative to the layer; see --debug for the traceback.",
            ) from error
        if not isinstance(converted, Mapping):
            raise TargetError(
                f"{what}: convert_state_dict returned no state dict", expected="a mapping", found=type(converted).__name__
            )
        return converted


def find_target(name: str) -> Target:
    """Find a target by the notation above.

    Raises:
        TargetError: The file, the module or the name in it does not exist or cannot be imported.
    """
    if name in _OWN:
        own = _OWN[name]
        return Target(name=name, factory=own, source_digest=_digest_of(sys.modules[own.__module__]))
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise TargetError(f"--target {name!r} is unknown", expected=_NOTATION)
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        public = [key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__]
        raise TargetError(
            f"{place} has no {attribute!r} to call", found=f"the classes {', '.join(public) or '(none)'}"
        )
    return Target(name=name, factory=factory, source_digest=_digest_of(module))


def target_config(spec: ModelSpec) -> SimpleNamespace:
    """config.json as writable attributes, under the hub's and transformers' names both."""
    config = SimpleNamespace(**dict(spec.raw))
    for name, value in spec.quantities().items():
        setattr(config, name, value)
    config.num_experts = spec.num_local_experts
    config.moe_intermediate_size = spec.intermediate_size
    config.partial_rotary_factor = spec.rotary_dim / spec.head_dim
    config.rope_parameters = {
        "rope_type": "default",
        "rope_theta": spec.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
    }
    return config


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"target file {path} does not exist", next_step=f"Give --target as {_NOTATION}.")
    specification = importlib.util.spec_from_file_location(f"mm2_target_{path.stem}", path)
    assert specification is not None and specification.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    # As for a script: what lies beside the file can be imported from it.
    if str(path.resolve().parent) not in sys.path:
        sys.path.insert(0, str(path.resolve().parent))
    return _imported(str(path), lambda: _execute(specification.loader, module))


def _execute(loader: Any, module: ModuleType) -> ModuleType:
    loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    return _imported(name, lambda: importlib.import_module(name))


def _imported(what: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except Exception as error:  # the port's own code: anything can come
        raise TargetError(
            f"target {what} cannot be imported",
            found=f"{type(error).__name__}: {error}",
            next_step=f"Give --target as {_NOTATION}; see --debug for the traceback.",
        ) from error


def _digest_of(module: ModuleType) -> str:
    source = getattr(module, "__file__", None)
    return hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""

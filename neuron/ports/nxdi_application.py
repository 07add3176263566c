"""A port's application: its class of the whole model on NxDI, which converts a checkpoint for a deployment.

An application is a subclass of NxDI's NeuronBaseForCausalLM. Its `convert_hf_to_neuron_state_dict` gives the hub's
tensors NxDI's names and shapes. Behind it, NxDI casts them and NxD divides them among the ranks. Here all three run on
one layer: the model's config says one layer, and the layer's tensors are those of layer 0. So a conversion that treats
some layers differently is seen as it treats layer 0. Written against NxDI 0.9 and 0.10.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from minimax_tools.checkpoint.layer_tensors import CheckpointTensors
from minimax_tools.errors import TargetError, list_faults
from neuron.ports.target import port_errors

# Attribute of the port's layer or module: its application, or None for mm2's table of names.
CHOICE = "mm2_causal_lm"
CONVERT = "convert_hf_to_neuron_state_dict"
# A subclass of NeuronBaseForCausalLM exists only if its module was imported.
_BASE_MODULE, _BASE = "neuronx_distributed_inference.models.model_base", "NeuronBaseForCausalLM"
# Beginning of the layer's names in a model of one layer.
_PREFIX = "layers.0."
_FALL_BACK = f"{CHOICE} = None in the layer's class or module lets mm2's table fill the weights instead"


class PortApplication:
    """The application of a port, as the source of a layer's weights."""

    def __init__(self, application: type[Any]) -> None:
        self._class = application

    def __str__(self) -> str:
        return f"{self._class.__name__}.{CONVERT}, then NxDI's cast and NxD's sharding"

    def cast_module(self, layer: nn.Module, nxdi_config: Any) -> None:
        """Cast the layer's parameters and buffers as NxDI casts the model that it compiles."""
        from neuronx_distributed_inference.models.model_wrapper import DecoderModelInstance

        with self._naming(f"NxDI's cast of {type(layer).__name__}"):
            # NxDI casts in place what this constructor returns.
            DecoderModelInstance(model_cls=lambda *_, **__: layer, config=nxdi_config).load_module()

    def convert(
        self, tensors: CheckpointTensors, layer: nn.Module, nxdi_config: Any, *, rank: int, tp_degree: int
    ) -> dict[str, torch.Tensor]:
        """Return this rank's weights of the layer by the layer's names, as far as the conversion gives them.

        All tensors of the layer are in memory while it works.
        """
        from neuronx_distributed.trace.trace import get_sharded_checkpoint

        config = copy.copy(nxdi_config)
        config.num_hidden_layers = 1
        given = {_PREFIX + name: tensors[name] for name in tensors}
        with self._naming(f"{self._class.__name__}.{CONVERT}"):
            converted = self._class.convert_hf_to_neuron_state_dict(given, config)
        with warnings.catch_warnings():
            # NxDI and NxD warn of each tensor that they cast or drop.
            warnings.simplefilter("ignore")
            with self._naming("NxDI's cast of the converted weights"):
                converted = self._cast(converted, config)
            with self._naming("NxD's sharding of the converted weights"):
                model = nn.Module()
                model.layers = nn.ModuleList([layer])
                get_sharded_checkpoint(converted, model, rank, tp_degree)
        weights = {
            name.removeprefix(_PREFIX): tensor
            for name, tensor in converted.items()
            if name.startswith(_PREFIX)
        }
        self._refuse_misfits(weights, layer)
        return weights

    def _refuse_misfits(self, weights: Mapping[str, torch.Tensor], layer: nn.Module) -> None:
        misfits = [
            f"{name} (expected {list(place.shape)}, found {list(weights[name].shape)})"
            for name, place in layer.state_dict(keep_vars=True).items()
            if name in weights and weights[name].shape != place.shape
        ]
        if misfits:
            raise TargetError(
                f"{self._class.__name__}.{CONVERT} gives weights that do not fit the layer",
                found=list_faults(misfits),
                next_step=f"Correct it: NxDI would refuse them too. Or: {_FALL_BACK}.",
            )

    def _cast(self, converted: dict[str, torch.Tensor], config: Any) -> Any:
        """Let NxDI cast the weights: its loader reads a state dict, here the converted one, and casts it."""
        # Without its constructor, which plans the whole model.
        application: Any = object.__new__(self._class)
        nn.Module.__init__(application)
        application.config, application.neuron_config = config, config.neuron_config
        application.fused_spec_config, application.model_path = None, ""
        application.get_state_dict = lambda *_: converted
        return application.checkpoint_loader_fn()

    def _naming(self, what: str) -> Any:
        return port_errors(
            f"{what} failed",
            activity=what,
            next_step="It gets one layer's tensors, dequantised, by the hub's names as of layer 0; see --debug for the "
            f"traceback. Give NxDI's config what it needs by mm2_neuron_config, or: {_FALL_BACK}.",
        )


def find_application(layer_class: Callable[..., Any], module: ModuleType) -> PortApplication | None:
    """Find the application that the layer's class or module names, or the one in the layer's module.

    Of several, it is the one whose model is built of `layer_class`. None if there is none that converts.
    """
    for owner in (layer_class, module):
        if hasattr(owner, CHOICE):
            return _named_application(getattr(owner, CHOICE), owner)
    for place in _modules_of(layer_class, module):
        candidates = _applications_in(place)
        if len(candidates) > 1:
            candidates = _builders_of(layer_class, candidates) or candidates
        if len(candidates) > 1:
            names = ", ".join(found.__name__ for found in candidates)
            raise TargetError(
                f"{place.__name__} has several subclasses of {_BASE}",
                expected=f"one whose model is built of {layer_class.__name__}",
                found=names,
                next_step=f"Name it in the layer's class: {CHOICE} = CLASS. Or: {_FALL_BACK}.",
            )
        if candidates:
            return PortApplication(candidates[0])
    return None


def _named_application(named: object, owner: object) -> PortApplication | None:
    if named is None:
        return None
    if not (inspect.isclass(named) and callable(getattr(named, CONVERT, None))):
        raise TargetError(
            f"{getattr(owner, '__name__', owner)}.{CHOICE} is no application of NxDI",
            expected=f"a subclass of {_BASE}, or None for mm2's table",
            found=repr(named),
        )
    return PortApplication(named)


def _modules_of(layer_class: Callable[..., Any], module: ModuleType) -> Iterator[ModuleType]:
    """Yield the layer's module, then those of the classes that it derives from."""
    yield module
    for base in getattr(layer_class, "__mro__", ()):
        found = sys.modules.get(base.__module__)
        if found is not None and found is not module:
            yield found


def _applications_in(module: ModuleType) -> list[type[Any]]:
    """List the applications of a module that convert; those that it defines come before those that it imports."""
    base = getattr(sys.modules.get(_BASE_MODULE), _BASE, None)
    if base is None:
        return []
    found = {
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, base)
        # The base returns what it is given.
        and getattr(value, CONVERT) is not getattr(base, CONVERT)
    }
    own = [value for value in found if value.__module__ == module.__name__]
    return sorted(own or found, key=lambda value: value.__name__)


def _builders_of(layer_class: Callable[..., Any], candidates: list[type[Any]]) -> list[type[Any]]:
    """List the applications whose model is built of `layer_class`; if none is, of the nearest class it derives from."""
    bases = getattr(layer_class, "__mro__", (layer_class,))
    for layer in bases[: bases.index(nn.Module)] if nn.Module in bases else bases:
        if builders := [found for found in candidates if _builds(found, layer)]:
            return builders
    return []


def _builds(application: type[Any], layer_class: Callable[..., Any]) -> bool:
    """Decide whether the code that builds the application's model names `layer_class`."""
    model_class = getattr(application, "_model_cls", None)
    for name in ("init_model", "__init__"):
        function = getattr(model_class, name, None)
        code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        if code is not None and any(names.get(used) is layer_class for used in _names_in(code)):
            return True
    return False


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names that code uses, with those of the functions and comprehensions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)

"""Target: the port under test, found by name, built as the protocol says, and loaded.

`builtin` is mm2's device layer, `reference` its plain PyTorch layer; `PATH.py:NAME` and
`package.module:NAME` name a port's own. NAME is called as `NAME(config, layer_idx)`. `nxdi:` before
such a name says that it is a layer on neuronx-distributed-inference; `traced:FILE` is one that was compiled before.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.errors import TargetError, UsageError
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.layer import ReferenceLayer
from neuron.builtin.layer import DeviceLayer
from neuron.builtin.moe import CHUNK_SIZE_BYTES, experts_per_chunk
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import Runtime
from neuron.devices.weights import Weight, WeightLoader, unchanged
from neuron.ports.nxdi import PREFIX as NXDI
from neuron.ports.nxdi import NxdiLayer, NxdiPort, require_nxdi
from neuron.ports.own_code import own_code
from neuron.ports.sources import TargetSource, import_file, import_module
from neuron.ports.traced import PREFIX as TRACED
from neuron.ports.traced import TracedFiles, TracedLayer

# What the graph hard-wires; a config that transformers wrote may leave these keys out.
_FIXED_VALUES = {
    "hidden_act": "silu",
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
}
_CONVERT = "convert_state_dict"
_BUILD_STEP = "It is called as NAME(config, layer_idx); see --debug for the traceback."
_CONVERT_STEP = "It gets the hub's names relative to the layer; see --debug for the traceback."
_LOAD_STEP = "Its state_dict() is filled, then to(device) called; see --debug for the traceback."


class ResidentReference(ReferenceLayer):
    """The reference layer built once, without memory: nothing in it depends on the layer but its weights."""

    reuse = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        # Drawing random numbers for a layer of true size takes a minute, and they are overwritten.
        with torch.device("meta"):
            super().__init__(config, layer_idx)


_OWN: dict[str, type[nn.Module]] = {"builtin": DeviceLayer, "reference": ResidentReference}

# Conversions whose weights are written straight into their storage.
_FILL_STORAGE = (DeviceLayer.convert_state_dict, NxdiLayer.convert_state_dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An implementation of a decoder layer.

    Args:
        name: How the user named it.
        factory: Called as `factory(config, layer_idx)`; returns a module.
        source_digest: sha256 of the source it comes from.
    """

    name: str
    factory: Callable[[Any, int], nn.Module]
    source_digest: str

    def __post_init__(self) -> None:
        if self.build_dtype is not None and not isinstance(self.build_dtype, torch.dtype):
            raise TargetError(
                f"target {self.name}: build_dtype is no dtype",
                expected="a torch.dtype, such as torch.float32",
                found=repr(self.build_dtype),
            )

    @property
    def is_reused(self) -> bool:
        """Whether one module serves all layers, its weights swapped."""
        return bool(getattr(self.factory, "reuse", False))

    @property
    def build_dtype(self) -> torch.dtype | None:
        """The default dtype that the port wants to be built under; None for the run's."""
        dtype: torch.dtype | None = getattr(self.factory, "build_dtype", None)
        return dtype

    @property
    def divides_weights(self) -> bool:
        """Whether each of several ranks is known to hold its part of a layer alone; other ports do not tell."""
        return self.factory is DeviceLayer or isinstance(self.factory, NxdiPort)

    def num_experts_at_once(
        self, spec: ModelSpec, *, dtype: torch.dtype, is_lazy: bool, ranks: Ranks | None = None
    ) -> int | None:
        """How many experts run together, in one graph on a lazy device; None for a port, which does not tell."""
        if self.factory is DeviceLayer:
            return experts_per_chunk(
                target_config(spec, ranks=ranks), dtype=dtype, chunk_size_bytes=CHUNK_SIZE_BYTES
            )
        if self.factory is ResidentReference:
            return spec.num_local_experts if is_lazy else 1
        return None

    def sharing(self, runtime: Runtime) -> dict[str, int | str]:
        """How ranks share a layer, as options by name; the dtype of sums where mm2's own layer adds up."""
        adds_up = isinstance(self.factory, type) and issubclass(self.factory, DeviceLayer)
        return {name: value for name, value in runtime.sharing.items() if adds_up or name != "reduce_dtype"}

    @property
    def reads_weights(self) -> bool:
        """Whether its weights come from the checkpoint rather than with it."""
        return not isinstance(self.factory, TracedFiles)

    @property
    def fills_storage(self) -> bool:
        """Whether, as far as it tells unbuilt, weights go straight into their places: no second layer lies beside."""
        convert = getattr(self.factory, _CONVERT, None)
        return isinstance(self.factory, NxdiPort) or (
            isinstance(self.factory, type) and (convert is None or convert in _FILL_STORAGE)
        )

    def converts(self, module: nn.Module) -> bool:
        """Whether code of the port's turns the checkpoint's tensors into the module's, beside them in memory."""
        convert = _conversion(module, self.factory)
        return convert is not None and getattr(convert, "__func__", None) not in _FILL_STORAGE

    def build(
        self, spec: ModelSpec, layer: int, *, dtype: torch.dtype, ranks: Ranks | None = None
    ) -> nn.Module:
        """The module for one layer, its weights not loaded.

        Args:
            spec: The model.
            layer: The layer.
            dtype: The run's dtype.
            ranks: Those that share the layer; None for one alone.

        Raises:
            TargetError: The port raised, or did not return a module.
        """
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.build_dtype or dtype)
        try:
            failed = f"target {self.name} cannot be built for layer {layer}"
            activity = f"building layer {layer} of target {self.name}"
            with own_code(failed, activity=activity, next_step=_BUILD_STEP):
                module = self.factory(target_config(spec, ranks=ranks), layer)
                if isinstance(module, nn.Module):
                    module.eval()
        finally:
            torch.set_default_dtype(default)
        if not isinstance(module, nn.Module):
            raise TargetError(
                f"target {self.name} returned no module for layer {layer}",
                expected="torch.nn.Module",
                found=type(module).__name__,
                next_step="NAME(config, layer_idx) must return the layer.",
            )
        return module

    def load(
        self,
        module: nn.Module,
        tensors: LayerTensors,
        spec: ModelSpec,
        *,
        loader: WeightLoader,
        ranks: Ranks | None = None,
        prepared: dict[str, Weight] | None = None,
    ) -> None:
        """Load a layer's weights, or of several ranks what this one holds, and move `module` to the loader's device.

        Args:
            module: What `build` gave.
            tensors: The layer's.
            spec: The model.
            loader: Brings them there.
            ranks: Those that share the layer; None for one alone.
            prepared: What `prepare` gave for this layer; None where it was not asked.

        Raises:
            CheckpointError: A tensor cannot be read.
            TargetError: The port's conversion raised, or its names or shapes do not fit.
        """
        if isinstance(module, TracedLayer):
            # Its weights came with it.
            layers = range(tensors.layer, tensors.layer + 1)
            module.verify_model(ModelFingerprint.of(tensors.reader, spec, layers))
            return
        what = f"target {self.name}, layer {tensors.layer}"
        if prepared is None:
            prepared = self._weights(module, tensors, target_config(spec, ranks=ranks), what=what)
        activity = f"loading layer {tensors.layer} of target {self.name}"
        with own_code(f"{what} cannot be loaded", activity=activity, next_step=_LOAD_STEP):
            loader.load(module, prepared, what=what)

    def prepare(
        self,
        module: nn.Module,
        tensors: LayerTensors,
        spec: ModelSpec,
        *,
        loader: WeightLoader,
        ranks: Ranks | None = None,
    ) -> dict[str, Weight]:
        """Begin on the host what `load` does, while `module` computes with another layer's weights.

        Raises:
            CheckpointError: As for `load`.
            TargetError: As for `load`.
        """
        what = f"target {self.name}, layer {tensors.layer}"
        weights = self._weights(module, tensors, target_config(spec, ranks=ranks), what=what)
        loader.begin(module, weights)
        return weights

    def _weights(
        self, module: nn.Module, tensors: LayerTensors, config: SimpleNamespace, *, what: str
    ) -> dict[str, Weight]:
        """The module's weights, in a dictionary that nobody else holds."""
        converted = self._convert(module, tensors, config, what=what)
        if isinstance(converted, LayerTensors):
            return {name: unchanged(converted, name) for name in converted}
        return dict(converted)

    def _convert(
        self, module: nn.Module, tensors: LayerTensors, config: SimpleNamespace, *, what: str
    ) -> Mapping[str, Weight]:
        convert = _conversion(module, self.factory)
        if convert is None:
            return tensors
        # Tensors are read when the port asks for them: a damaged shard is not the port's fault, and says so.
        activity = f"converting the weights of layer {tensors.layer} of target {self.name}"
        with own_code(f"{what}: convert_state_dict failed", activity=activity, next_step=_CONVERT_STEP):
            converted = convert(tensors, config, tensors.layer)
        if not isinstance(converted, Mapping):
            raise TargetError(
                f"{what}: convert_state_dict returned no state dict",
                expected="a mapping of names to tensors",
                found=type(converted).__name__,
                next_step="Return what load_state_dict would take.",
            )
        return converted


def find_target(name: str) -> Target:
    """Find a target by the notation above.

    Raises:
        UsageError: The name is not of that notation.
        TargetError: The file, the module or the name in it does not exist or cannot be imported.
    """
    if name in _OWN:
        # Of the file that computes.
        module = sys.modules[(DeviceLayer if name == "builtin" else ReferenceLayer).__module__]
        source = TargetSource(place=name, module=module)
        return Target(name=name, factory=_OWN[name], source_digest=source.digest())
    if name.startswith(TRACED):
        files = TracedFiles(pattern=name.removeprefix(TRACED))
        return Target(name=name, factory=files, source_digest=files.digest())
    if name.startswith(NXDI):
        return _find_nxdi_port(name)
    source, factory = _find_callable(name, name)
    return Target(name=name, factory=factory, source_digest=source.digest())


def target_config(spec: ModelSpec, *, ranks: Ranks | None = None) -> SimpleNamespace:
    """config.json as writable attributes of its own, under the hub's and transformers' names both.

    `config.ranks` tells which rank this is, of how many.
    """
    values = {**_FIXED_VALUES, **copy.deepcopy(dict(spec.raw)), **spec.quantities()}
    config = SimpleNamespace(**values)
    config.ranks = ranks or Ranks()
    config.num_experts = spec.num_local_experts
    config.moe_intermediate_size = spec.intermediate_size
    config.partial_rotary_factor = spec.rotary_dim / spec.head_dim
    config.rope_parameters = {
        "rope_type": "default",
        "rope_theta": spec.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
    }
    return config


def _find_nxdi_port(name: str) -> Target:
    require_nxdi()
    source, layer_class = _find_callable(name, name.removeprefix(NXDI))
    factory = NxdiPort(layer_class=layer_class, module=source.module)
    return Target(name=name, factory=factory, source_digest=source.digest())


def _find_callable(name: str, notation: str) -> tuple[TargetSource, Callable[..., Any]]:
    """What `PATH.py:NAME` or `package.module:NAME` names, with its source."""
    place, _, attribute = notation.rpartition(":")
    if not place or not attribute:
        raise UsageError(
            f"--target {name!r} is unknown",
            expected=f"{', '.join(_OWN)}, PATH.py:NAME or package.module:NAME; "
            f"{NXDI} before one of them, or traced:FILE",
            next_step="Name what to call after a colon, as in port.py:DecoderLayer.",
        )
    source = import_file(Path(place)) if place.endswith(".py") else import_module(place)
    return source, source.find(attribute)


def _conversion(module: nn.Module, factory: Any) -> Any:
    return getattr(module, _CONVERT, None) or getattr(factory, _CONVERT, None)

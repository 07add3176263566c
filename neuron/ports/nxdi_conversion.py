"""Conversions of a checkpoint's layer to the names and shapes of a layer on NxDI, by whom they are.

| conversion | whose |
|---|---|
| `LayerConversion` | the layer's own `convert_state_dict` |
| `ApplicationConversion` | the port's application, as a deployment converts |
| `TableConversion` | mm2's: the table in `nxdi_layout` |
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.errors import list_faults
from neuron.devices.weights import Weight
from neuron.ports.nxdi_application import CHOICE, PortApplication
from neuron.ports.nxdi_layout import NxdiLayout
from neuron.ports.nxdi_sites import LAYER
from neuron.ports.target import ConversionOrigin

logger = logging.getLogger(__name__)


class Conversion(ABC):
    """A way to make the weights of an `NxdiLayer`."""

    # Whether weights are read into their storage; see `read_in_place`.
    reads_in_place: ClassVar[bool] = False

    def __call__(self, tensors: LayerTensors, config: Any, layer_idx: int) -> dict[str, Weight]:
        """Return the weights by the names of an `NxdiLayer`; `config` has the keys of config.json as attributes."""
        weights = self.weights(tensors, config, layer_idx)
        return {f"{LAYER}.{name}": weight for name, weight in weights.items()}

    @abstractmethod
    def weights(self, tensors: LayerTensors, config: Any, layer_idx: int) -> Mapping[str, Weight]:
        """Return the weights by the names of the port's layer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerConversion(Conversion):
    """The layer's own `convert_state_dict`."""

    convert: Callable[..., Any]

    def weights(self, tensors: LayerTensors, config: Any, layer_idx: int) -> Mapping[str, Weight]:
        """Call it."""
        converted: Mapping[str, Weight] = self.convert(tensors, config, layer_idx)
        return converted


@dataclass(frozen=True, kw_only=True, eq=False)
class ApplicationConversion(Conversion):
    """The conversion of the port's application, with the cast and the sharding behind it."""

    application: PortApplication
    layer: nn.Module
    nxdi_config: Any
    layout: NxdiLayout

    def weights(self, tensors: LayerTensors, config: Any, layer_idx: int) -> Mapping[str, Weight]:
        """Convert, cast and shard all tensors; a weight that none of them gives stays as it was built."""
        places = self.layer.state_dict(keep_vars=True)
        self.layout.warn_of_unused(places, tensors)
        found = self.application.convert(
            tensors, self.layer, self.nxdi_config, rank=self.layout.rank, tp_degree=self.layout.tp_degree
        )
        missing = [name for name in places if name not in found]
        if missing:
            logger.warning(
                "The port's conversion gives nothing for %s: it stays as the layer's constructor made it.",
                list_faults(missing),
            )
        # NxD drops names that the layer lacks, and NxDI's loader asks for none.
        return {name: found[name] if name in found else _as_built(place) for name, place in places.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class TableConversion(Conversion):
    """The conversion by mm2's table."""

    reads_in_place: ClassVar[bool] = True

    layer: nn.Module
    layout: NxdiLayout

    def weights(self, tensors: LayerTensors, config: Any, layer_idx: int) -> Mapping[str, Weight]:
        """Return the weights, which are read when they are loaded."""
        places = self.layer.state_dict(keep_vars=True)
        self.layout.warn_of_unused(places, tensors)
        return self.layout.weights(places, tensors)


def find_origin(
    layer_class: Callable[..., Any], module: ModuleType, application: PortApplication | None
) -> ConversionOrigin:
    """Return whose conversion fills a layer of `layer_class`, which `module` defines."""
    if hasattr(layer_class, "convert_state_dict"):
        return ConversionOrigin(words=f"{layer_class.__name__}.convert_state_dict", is_of_port=True)
    if application is not None:
        return ConversionOrigin(words=str(application), is_of_port=True)
    is_chosen = hasattr(layer_class, CHOICE) or hasattr(module, CHOICE)
    reason = (
        f"{CHOICE} = None" if is_chosen else "the port has no subclass of NeuronBaseForCausalLM that converts"
    )
    return ConversionOrigin(words=f"mm2's table of NxDI's names, not the port: {reason}", is_of_port=False)


def _as_built(place: torch.Tensor) -> torch.Tensor:
    """Return a weight as the constructor made it; zeros for one that NxD divides, whose memory was left unset."""
    return torch.zeros_like(place) if getattr(place, "tensor_model_parallel", False) else place.detach()

"""Ports built on neuronx-distributed-inference: `--target nxdi:package.module:DecoderLayerClass`.

NxDI stands for that package, NxD for neuronx-distributed, on which it is built. A layer there takes NxDI's config and a
boolean mask, and holds weights in NxDI's layout. `NxdiTarget` builds it as NxDI builds a model, and `NxdiLayer`
translates between the layer and the target protocol. Written against NxDI 0.9 and 0.10.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from torch import nn

from minimax_tools.errors import TargetError, UsageError
from minimax_tools.machine.native_output import native_output_dropped
from minimax_tools.model.spec import ModelSpec
from neuron.ports.nxdi_application import PortApplication, find_application
from neuron.ports.nxdi_config import make_nxdi_config, read_options
from neuron.ports.nxdi_layer import (
    ApplicationConversion,
    Conversion,
    LayerConversion,
    NxdiLayer,
    TableConversion,
    find_origin,
)
from neuron.ports.nxdi_layout import NxdiLayout
from neuron.ports.sources import import_callable
from neuron.ports.target import ConversionOrigin, Target

PREFIX = "nxdi:"
_LOG_LEVEL_VARIABLE = "NXD_LOG_LEVEL"
# Beginnings of the names of NxD's and NxDI's loggers.
_LOGGER_PREFIXES = ("neuronx_distributed", "Neuron")
# Second name under which NxD registers a weight.
_MASTER_WEIGHT = "master_weight"
_INSTALL_STEP = (
    "Run in the Neuron SDK's virtual environment for NxD Inference, or install it: pip install "
    "--extra-index-url https://pip.repos.neuron.amazonaws.com neuronx-distributed-inference."
)


@dataclass(frozen=True, kw_only=True)
class NxdiTarget(Target):
    """A decoder layer on neuronx-distributed-inference."""

    forms = f"{PREFIX}PATH.py:NAME or {PREFIX}package.module:NAME"
    # On a device, its attention kernels know no mask: they take all columns before a token for earlier tokens.
    pads_right = True
    divides_weights = True

    layer_class: Callable[..., Any]  # called as `layer_class(config, layer_idx)`, with NxDI's config
    module: ModuleType  # the module that defines it
    application: PortApplication | None  # the port's class of the whole model; None for none that converts

    @classmethod
    def find(cls, name: str) -> NxdiTarget | None:
        """Import the class behind `nxdi:`.

        Raises:
            UsageError: What follows the prefix has neither of the two `forms`.
            TargetError: NxDI is not installed, the port cannot be imported, or has several applications.
        """
        if not name.startswith(PREFIX):
            return None
        require_nxdi()
        found = import_callable(name.removeprefix(PREFIX))
        if found is None:
            raise UsageError(f"--target {name!r} is unknown", expected=cls.forms)
        source, layer_class = found
        return cls(
            name=name,
            layer_class=layer_class,
            module=source.module,
            application=find_application(layer_class, source.module),
            source_digest=source.digest(),
        )

    @property
    def port_config(self) -> Mapping[str, Any]:
        """The options of module and class, of which those of the class come last."""
        return read_options(self.layer_class, self.module)

    @property
    def is_reused(self) -> bool:
        """True if the class sets `reuse`."""
        return bool(getattr(self.layer_class, "reuse", False))

    @property
    def fills_storage(self) -> bool:
        """True if mm2's table fills the layer: it reads in place."""
        return self.application is None and not self._converts_itself

    @property
    def conversion(self) -> ConversionOrigin:
        """The origin of the conversion that fills the layer."""
        return find_origin(self.layer_class, self.module, self.application)

    @property
    def _converts_itself(self) -> bool:
        return hasattr(self.layer_class, "convert_state_dict")

    def make(self, config: Any, layer_idx: int) -> NxdiLayer:
        """Build the layer with NxDI's config.

        Raises:
            TargetError: NxDI is not installed, the module has several configs of NxDI, or NxDI cannot cast the layer.
        """
        require_nxdi()
        log_to_stderr()
        degree, rank = _open_parallel_state()
        nxdi_config = make_nxdi_config(
            self.layer_class,
            self.module,
            config,
            dtype=torch.get_default_dtype(),  # `Target.build` sets it to the run's dtype
            tp_degree=degree,
        )
        layer = _build_without_random_weights(self.layer_class, nxdi_config, layer_idx)
        layout = NxdiLayout(spec=ModelSpec.from_config(vars(config)), tp_degree=degree, rank=rank)
        return NxdiLayer(
            layer,
            conversion=self._choose_conversion(layer, nxdi_config, layout),
            layout=layout,
            neuron_config=nxdi_config.neuron_config,
            is_cpu_mode=is_cpu_mode(),
        )

    def _choose_conversion(self, layer: Any, nxdi_config: Any, layout: NxdiLayout) -> Conversion:
        """Return the way to fill the layer; for the application's, cast the layer first as NxDI does."""
        if self._converts_itself:
            own = getattr(layer, "convert_state_dict", None) or self.layer_class.convert_state_dict  # type: ignore[attr-defined]
            return LayerConversion(convert=own)
        if self.application is None:
            return TableConversion(layer=layer, layout=layout)
        self.application.cast_module(layer, nxdi_config)
        return ApplicationConversion(
            application=self.application, layer=layer, nxdi_config=nxdi_config, layout=layout
        )


def require_nxdi() -> None:
    """Raise TargetError unless neuronx-distributed-inference can be imported."""
    # Its loggers write to standard output, where results belong. Their level is set here, because it is read once, at
    # the import below.
    os.environ.setdefault(_LOG_LEVEL_VARIABLE, "warning")
    try:
        import neuronx_distributed_inference.models.config  # noqa: F401
    except Exception as error:  # the placeholders on PyPI raise other errors
        raise TargetError(
            "--target nxdi:… needs the package neuronx_distributed_inference, which cannot be imported here",
            found=f"{type(error).__name__}: {error}",
            next_step=_INSTALL_STEP,
        ) from error


def is_cpu_mode() -> bool:
    """Decide whether NxD is set to compute on the CPU."""
    from neuronx_distributed.utils import cpu_mode

    return bool(cpu_mode())


def log_to_stderr() -> None:
    """Turn NxD's and NxDI's loggers away from standard output, where results belong."""
    for name in tuple(logging.root.manager.loggerDict):
        if name.startswith(_LOGGER_PREFIXES):
            for handler in logging.getLogger(name).handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                    handler.setStream(sys.stderr)


def _open_parallel_state() -> tuple[int, int]:
    """Return the tensor-parallel degree and this rank; open NxD's groups if the run has not."""
    from neuronx_distributed.parallel_layers import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        # `open_runtime` opens these groups only on Neuron. Elsewhere all ranks are one tensor-parallel group.
        degree = torch.distributed.get_world_size()
        with native_output_dropped():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=degree)
    return (
        int(parallel_state.get_tensor_model_parallel_size()),
        int(parallel_state.get_tensor_model_parallel_rank()),
    )


def _build_without_random_weights(layer_class: Callable[..., Any], config: Any, layer_idx: int) -> Any:
    """Build the layer in NxD's mode for ahead-of-time (AOT) compilation, in which it draws no random weights.

    Else NxD would draw them whole in float32, 10 GB for a full-size layer, only for loading to overwrite them.
    """
    from neuronx_distributed.parallel_layers import parallel_state

    old_mode = parallel_state.get_aot_mode()
    parallel_state.set_aot_mode(True)
    try:
        layer = layer_class(config, layer_idx)
    finally:
        parallel_state.set_aot_mode(old_mode)
    if isinstance(layer, nn.Module):
        for module in layer.modules():
            # In this mode NxD registers the weight a second time, and strict loading would ask for it under that name.
            master = module._parameters.get(_MASTER_WEIGHT)
            if master is not None and master is getattr(module, "weight", None):
                module._parameters[_MASTER_WEIGHT] = None
    return layer

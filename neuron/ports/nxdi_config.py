"""NxDI's config of a model, built for one layer of a port.

NxDI's config of a model (InferenceConfig) holds its config of the device (NeuronConfig). Both are of the classes that
the port's module names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from minimax_tools.errors import TargetError

# Attribute of the port's class or module that overrides mm2's choices for NxDI's MoENeuronConfig.
OPTIONS = "mm2_neuron_config"
# Keys that models on NxDI need and MiniMax-M2's config.json lacks.
ABSENT_KEYS: Mapping[str, object] = {
    "n_shared_experts": 0,
    "norm_topk_prob": True,
    "pad_token_id": 0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}


def read_options(port_class: Any, module: ModuleType | None) -> dict[str, Any]:
    """Return a port's options for NxDI's config of the device: its module's, then its class's."""
    options: dict[str, Any] = {}
    for owner in (module, port_class):
        declared = getattr(owner, OPTIONS, {})
        if not isinstance(declared, Mapping):
            raise TargetError(
                f"{OPTIONS} of {getattr(owner, '__name__', owner)} cannot be read",
                expected="a dict of options",
                found=type(declared).__name__,
            )
        options |= declared
    return options


def make_nxdi_config(
    layer_class: Callable[..., Any],
    module: ModuleType,
    config: Any,
    *,
    dtype: torch.dtype,
    tp_degree: int,
) -> Any:
    """Build NxDI's config of the model for a layer of `layer_class`, which `module` defines.

    Args:
        layer_class: The port's layer.
        module: The port's module.
        config: The keys of config.json as attributes.
        dtype: The run's dtype.
        tp_degree: Number of ranks that share the layer.
    """
    config_class = _find_config_class(layer_class, module)
    options = {
        "tp_degree": tp_degree,
        "moe_tp_degree": tp_degree,
        "torch_dtype": dtype,
        "router_config": {"act_fn": config.scoring_func, "dtype": torch.float32},
        # The port's own options come last.
        **read_options(layer_class, module),
    }
    neuron_config = config_class.get_neuron_config_cls()(**options)
    # Layers read the stage while they are built.
    neuron_config.is_prefill_stage = True
    # `ranks` is mm2's addition to config.json, not NxDI's.
    values = {name: value for name, value in vars(config).items() if name != "ranks"}
    return config_class(neuron_config, **{**ABSENT_KEYS, **values})


def _find_config_class(layer_class: Callable[..., Any], module: ModuleType) -> Any:
    """Find the subclass of InferenceConfig that the layer's constructor names, or the only one in the module."""
    from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig

    configs = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, InferenceConfig) and value is not InferenceConfig
    }
    named = _annotation_of_config(layer_class)
    if named in configs:
        return configs[named]
    # Configs that the module defines come before those that it imports.
    own = {name: value for name, value in configs.items() if value.__module__ == module.__name__}
    candidates = own or configs
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if candidates:
        raise TargetError(
            f"{module.__name__} has several configs of NxDI",
            expected=f"one, or one that the constructor of {layer_class.__name__} names: config: CLASS",
            found=", ".join(candidates),
            next_step="Annotate the constructor's config.",
        )
    # The module has none: NxDI's own, for a device that runs a mixture of experts.
    return type("Mm2InferenceConfig", (InferenceConfig,), {"get_neuron_config_cls": lambda: MoENeuronConfig})


def _annotation_of_config(layer_class: Callable[..., Any]) -> str | None:
    """Return the name of the class that the constructor gives for its `config`; None if it gives none."""
    parameter = inspect.signature(layer_class).parameters.get("config")
    annotation = None if parameter is None else parameter.annotation
    if annotation is None or annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", None)

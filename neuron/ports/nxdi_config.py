"""NxDI's configs of a port: for one layer, and for an application, which `NxdiSettings` builds.

NxDI's config of a model (InferenceConfig) holds its config of the device (NeuronConfig). A layer's are of the classes
that the port's module names, an application's of those that it names itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from minimax_tools.errors import TargetError
from neuron.devices.ranks import Ranks
from neuron.ports.nxdi_stream import stream_replacement, with_stream_points
from neuron.ports.sources import OPTIONS
from neuron.ports.target import ModelBatch

# Keys that models and applications on NxDI need and config.json may lack.
_ABSENT_KEYS: Mapping[str, object] = {
    "n_shared_experts": 0,
    "pad_token_id": 0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "is_encoder_decoder": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "use_return_dict": True,
}
# mm2's additions to config.json.
_ADDED_KEYS = ("batch", "graph", "ranks")
# The cache's length is a multiple of this: NxDI's kernels take no other.
_LENGTH_MULTIPLE = 128
# On the CPU the stages share a module of the largest bucket, because NxDI's mask fits no other; and no kernel runs.
_CPU_OPTIONS: Mapping[str, object] = {
    "on_cpu": True,
    "enable_bucketing": False,
    "context_encoding_buckets": None,
    "token_generation_buckets": None,
    # Else NxDI takes it for prompts of some lengths.
    "attn_kernel_enabled": False,
}
_OPTIONS_STEP = f"Correct {OPTIONS} of the port's class or module."


def make_nxdi_config(
    layer_class: Callable[..., Any],
    module: ModuleType,
    config: Any,
    *,
    options: Mapping[str, object],
    dtype: torch.dtype,
    tp_degree: int,
) -> Any:
    """Build NxDI's config of the model for a layer of `layer_class`, which `module` defines.

    Args:
        layer_class: The port's layer.
        module: The port's module.
        config: The keys of config.json as attributes.
        options: The port's options for the device.
        dtype: The run's dtype.
        tp_degree: Number of ranks that share the layer.
    """
    config_class = _find_config_class(layer_class, module)
    device_options = _device_options(config, options, dtype=dtype, tp_degree=tp_degree)
    neuron_config = config_class.get_neuron_config_cls()(**device_options)
    # Layers read the stage while they are built.
    neuron_config.is_prefill_stage = True
    return config_class(neuron_config, **_model_keys(config))


def _device_options(
    config: Any, own: Mapping[str, object], *, dtype: torch.dtype, tp_degree: int, **further: object
) -> dict[str, object]:
    """Return the options of NxDI's config of the device, of which the port's `own` come last."""
    options = {
        "tp_degree": tp_degree,
        "torch_dtype": dtype,
        "router_config": {
            "act_fn": str(config.graph.router_scores),
            "dtype": torch.float32 if config.graph.has_float32_router else dtype,
        },
        **further,
        **own,
    }
    options.setdefault("moe_tp_degree", options["tp_degree"])
    return options


def _model_keys(config: Any) -> dict[str, object]:
    """Return the keys of NxDI's config of the model."""
    own = {name: value for name, value in vars(config).items() if name not in _ADDED_KEYS}
    return {**_ABSENT_KEYS, "norm_topk_prob": config.graph.normalises_shares, **own}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NxdiSettings:
    """The settings that decide how an application is built."""

    application_class: Any  # a subclass of NeuronBaseForCausalLM
    options: Mapping[str, object]  # the port's options for the device
    config: Any  # the keys of config.json as attributes, with the run's `batch` and `ranks`
    dtype: torch.dtype

    @property
    def batch(self) -> ModelBatch:
        """The sizes of the run's batch."""
        batch: ModelBatch = self.config.batch
        return batch

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the model."""
        ranks: Ranks = self.config.ranks
        return ranks

    def build_config(self, folder: Path, *, is_on_cpu: bool, **overriding: object) -> Any:
        """Build NxDI's config of the model, with that of the device; the port's options override mm2's."""
        config_class = self.application_class.get_config_cls()
        neuron_config = config_class.get_neuron_config_cls()(**self._options(is_on_cpu=is_on_cpu))
        self._check(neuron_config, is_on_cpu=is_on_cpu)
        values = {**_model_keys(self.config), "_name_or_path": str(folder), **overriding}
        return config_class(neuron_config, **values)

    def build_application(self, folder: Path, config: Any) -> Any:
        """Build the application; if the run replaces the stream, with NxDI's tensor replacement at all points."""
        if not self.batch.replaces_stream:
            return self.application_class(str(folder), config)
        neuron_config = config.neuron_config
        if getattr(neuron_config, "sequence_parallel_enabled", False):
            raise TargetError(
                f"{self.application_class.__name__} divides its stream among the ranks",
                found="sequence_parallel_enabled",
                next_step=f"Set it to False: NxDI's tensor replacement takes whole tensors. {_OPTIONS_STEP}",
            )
        neuron_config.tensor_replacement_config = stream_replacement(
            neuron_config, num_layers=self.config.num_hidden_layers, hidden_size=self.config.hidden_size
        )
        return with_stream_points(self.application_class)(str(folder), config)

    def _options(self, *, is_on_cpu: bool) -> dict[str, object]:
        options = _device_options(
            self.config,
            self.options,
            dtype=self.dtype,
            tp_degree=self.ranks.degree,
            batch_size=self.batch.num_prompts,
            seq_len=-(-self.batch.num_tokens // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE,
            output_logits=True,
            # The likeliest token: what mm2 can judge.
            on_device_sampling_config={"do_sample": False, "top_k": 1},
        )
        if is_on_cpu:
            # In the context pass NxDI pads the mask to `max_context_length`, and in its module to `seq_len`.
            options |= {**_CPU_OPTIONS, "max_context_length": options["seq_len"]}
        if self.batch.replaces_stream:
            # NxDI's tensor replacement takes a prefill of one size.
            options |= {"enable_bucketing": False, "max_context_length": options["seq_len"]}
        if options["on_device_sampling_config"] is None:
            # On the CPU NxDI would take the second tensor for keys of the cache.
            options["output_logits"] = False
        return options

    def _check(self, neuron_config: Any, *, is_on_cpu: bool) -> None:
        """Refuse options that this run cannot have, all at once."""
        batch = self.batch
        faults = []
        if neuron_config.batch_size != batch.num_prompts:
            faults.append(f"batch_size {neuron_config.batch_size} for {batch.num_prompts} prompts")
        if neuron_config.seq_len < batch.num_tokens:
            faults.append(f"seq_len {neuron_config.seq_len} for {batch.num_tokens} tokens")
        if neuron_config.padding_side != "right":
            faults.append(f"padding_side {neuron_config.padding_side!r}, where mm2 pads on the right")
        if is_on_cpu and neuron_config.is_continuous_batching:
            faults.append("is_continuous_batching, for which NxDI builds each stage apart on the CPU")
        if is_on_cpu and neuron_config.tp_degree != self.ranks.degree:
            faults.append(f"tp_degree {neuron_config.tp_degree} for --tp-degree {self.ranks.degree}")
        if faults:
            raise TargetError(
                f"{self.application_class.__name__} cannot be set up for this run",
                found="; ".join(faults),
                next_step=_OPTIONS_STEP,
            )

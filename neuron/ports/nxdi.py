"""Ports built on neuronx-distributed-inference: `--target nxdi:package.module:DecoderLayerClass`.

NxDI stands for that package, NxD for neuronx-distributed, on which it is built. A layer there takes NxDI's config and a
boolean mask [B,1,S,S], and holds weights in NxDI's layout. NxDI's config of a model (InferenceConfig) holds its config
of the device (NeuronConfig): `NxdiTarget` builds both, of the classes that the port's module names. `NxdiLayer`
translates between the layer and the target protocol. Written against NxDI 0.9 and 0.10.
B batch, S tokens of this pass, P tokens of the past, H hidden.
"""

from __future__ import annotations

import inspect
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

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.errors import TargetError, UsageError, list_faults
from minimax_tools.machine.native_output import native_output_dropped
from minimax_tools.model.site_layouts import Sharded
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from neuron.devices.weights import Weight, read_in_place
from neuron.ports.nxdi_layout import NxdiLayout
from neuron.ports.sources import import_callable
from neuron.ports.target import Target

logger = logging.getLogger(__name__)

PREFIX = "nxdi:"
# Attribute of the port's class or module that overrides mm2's choices for NxDI's MoENeuronConfig.
OPTIONS = "mm2_neuron_config"
_LOG_LEVEL_VARIABLE, CPU_MODE_VARIABLE = "NXD_LOG_LEVEL", "NXD_CPU_MODE"
# Beginnings of the names of NxD's and NxDI's loggers.
_LOGGER_PREFIXES = ("neuronx_distributed", "Neuron")
# Second name under which NxD registers a weight.
_MASTER_WEIGHT = "master_weight"
_INSTALL_STEP = (
    "Run in the Neuron SDK's virtual environment for NxD Inference, or install it: pip install "
    "--extra-index-url https://pip.repos.neuron.amazonaws.com neuronx-distributed-inference."
)
# Keys that models on NxDI need and MiniMax-M2's config.json lacks.
ABSENT_KEYS: Mapping[str, object] = {
    "n_shared_experts": 0,
    "norm_topk_prob": True,
    "pad_token_id": 0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
# Paths of submodules in a layer, and the names that its mixture of experts may have.
_ATTENTION, _QKV = "self_attn", "self_attn.qkv_proj"
_INPUT_NORM, _POST_NORM = "input_layernorm", "post_attention_layernorm"
_MOE_NAMES = ("block_sparse_moe", "mlp", "moe", "feed_forward")


class NxdiLayer(nn.Module):
    """A decoder layer on NxDI behind the target protocol."""

    def __init__(
        self, layer: nn.Module, *, layout: NxdiLayout, neuron_config: Any, is_cpu_mode: bool
    ) -> None:
        super().__init__()
        self.layer = layer
        self._layout = layout  # of this rank's weights
        self._neuron_config = neuron_config  # of the device: the layer reads its stage there
        self._is_cpu_mode = is_cpu_mode  # whether NxD was set to compute on the CPU
        self.sites = {site: f"layer.{path}" for site, path in find_sites(layer, layout).items()}

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """Run the layer on [B,S,H], mask [B,P+S] of 0/1 and positions [B,S]; return its output [B,S,H] first.

        Raises:
            TargetError: NxD was set to compute on another device than that of the states.
        """
        self._refuse_other_device(hidden_states.device)
        num_tokens = hidden_states.shape[1]
        causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=attention_mask.device).tril()
        is_real = attention_mask.bool()[:, None, None, :]
        active_mask = causal & is_real[..., -num_tokens:]
        self._neuron_config.is_prefill_stage = past_key_value is None
        keywords: dict[str, Any] = {"attention_mask": active_mask}
        if past_key_value is not None:
            # NxDI has two masks: one for the past, one for the tokens of this pass.
            past_mask = is_real[..., :-num_tokens].expand(-1, -1, num_tokens, -1)
            keywords = {
                "attention_mask": past_mask,
                "active_mask": active_mask,
                "past_key_value": past_key_value,
            }
        result = self.layer(hidden_states, position_ids=position_ids, **keywords)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def _refuse_other_device(self, device: torch.device) -> None:
        if (device.type == "cpu") != self._is_cpu_mode:
            raise TargetError(
                f"the port computes on {device}, which NxD was not told",
                expected=f"{CPU_MODE_VARIABLE}={int(device.type == 'cpu')}",
                found=f"{CPU_MODE_VARIABLE}={int(self._is_cpu_mode)}",
                next_step=f"Set {CPU_MODE_VARIABLE}=1 for --backend cpu, and only there.",
            )

    @read_in_place
    def convert_state_dict(self, tensors: LayerTensors, config: Any, layer_idx: int) -> dict[str, Weight]:
        """Return the layer's weights in NxDI's layout, read when they are loaded."""
        parameters = self.layer.state_dict(keep_vars=True)
        weights = self._layout.weights(parameters, tensors)
        unused = self._layout.unused(parameters, tensors)
        if unused:
            logger.warning("The port has no place for %s: it computes without.", list_faults(unused))
        return {f"layer.{name}": weight for name, weight in weights.items()}


class ConvertingNxdiLayer(NxdiLayer):
    """An `NxdiLayer` whose layer has a `convert_state_dict`, which returns the layer's own names."""

    def convert_state_dict(self, tensors: LayerTensors, config: Any, layer_idx: int) -> dict[str, Weight]:
        """Call the class's conversion."""
        convert: Any = self.layer.convert_state_dict
        return {f"layer.{name}": weight for name, weight in convert(tensors, config, layer_idx).items()}


@dataclass(frozen=True, kw_only=True)
class NxdiTarget(Target):
    """A decoder layer on neuronx-distributed-inference."""

    forms = f"{PREFIX}PATH.py:NAME or {PREFIX}package.module:NAME"
    divides_weights = True

    layer_class: Callable[..., Any]  # called as `layer_class(config, layer_idx)`, with NxDI's config
    module: ModuleType  # the module that defines it

    @classmethod
    def find(cls, name: str) -> NxdiTarget | None:
        """Import the class behind `nxdi:`.

        Raises:
            UsageError: What follows the prefix has neither of the two `forms`.
            TargetError: NxDI is not installed, or the port cannot be imported.
        """
        if not name.startswith(PREFIX):
            return None
        require_nxdi()
        found = import_callable(name.removeprefix(PREFIX))
        if found is None:
            raise UsageError(f"--target {name!r} is unknown", expected=cls.forms)
        source, layer_class = found
        return cls(name=name, layer_class=layer_class, module=source.module, source_digest=source.digest())

    @property
    def is_reused(self) -> bool:
        """True if the class sets `reuse`."""
        return bool(getattr(self.layer_class, "reuse", False))

    @property
    def fills_storage(self) -> bool:
        """True: `NxdiLayout` reads in place."""
        return True

    def make(self, config: Any, layer_idx: int) -> NxdiLayer:
        """Build the layer with NxDI's config.

        Raises:
            TargetError: NxDI is not installed, or the module has several configs of NxDI.
        """
        require_nxdi()
        log_to_stderr()
        degree, rank = open_parallel_state()
        nxdi_config = self._config(config, tp_degree=degree)
        layer = _build_without_random_weights(self.layer_class, nxdi_config, layer_idx)
        layout = NxdiLayout(spec=ModelSpec.from_config(vars(config)), tp_degree=degree, rank=rank)
        wrapper = ConvertingNxdiLayer if hasattr(layer, "convert_state_dict") else NxdiLayer
        neuron_config = nxdi_config.neuron_config
        return wrapper(layer, layout=layout, neuron_config=neuron_config, is_cpu_mode=is_cpu_mode())

    def _config(self, config: Any, *, tp_degree: int) -> Any:
        """Build NxDI's config of the model, which holds its config of the device. The port's own options come last."""
        config_class = self._config_class()
        options = {
            "tp_degree": tp_degree,
            "moe_tp_degree": tp_degree,
            "torch_dtype": torch.get_default_dtype(),  # `Target.build` sets it to the run's dtype
            "router_config": {"act_fn": config.scoring_func, "dtype": torch.float32},
            **getattr(self.module, OPTIONS, {}),
            **getattr(self.layer_class, OPTIONS, {}),
        }
        neuron_config = config_class.get_neuron_config_cls()(**options)
        # Layers read the stage while they are built.
        neuron_config.is_prefill_stage = True
        # `ranks` is mm2's addition to config.json, not NxDI's.
        values = {name: value for name, value in vars(config).items() if name != "ranks"}
        return config_class(neuron_config, **{**ABSENT_KEYS, **values})

    def _config_class(self) -> Any:
        """Find the subclass of InferenceConfig that the layer's constructor names, or the only one in its module."""
        from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig

        configs = {
            name: value
            for name, value in vars(self.module).items()
            if inspect.isclass(value) and issubclass(value, InferenceConfig) and value is not InferenceConfig
        }
        named = _annotation_of_config(self.layer_class)
        if named in configs:
            return configs[named]
        # Configs that the module defines come before those that it imports.
        own = {name: value for name, value in configs.items() if value.__module__ == self.module.__name__}
        candidates = own or configs
        if len(candidates) == 1:
            return next(iter(candidates.values()))
        if candidates:
            raise TargetError(
                f"{self.module.__name__} has several configs of NxDI",
                expected=f"one, or one that the constructor of {self.layer_class.__name__} names: config: CLASS",
                found=", ".join(candidates),
                next_step="Annotate the constructor's config.",
            )
        # The module has none: NxDI's own, for a device that runs a mixture of experts.
        return type(
            "Mm2InferenceConfig", (InferenceConfig,), {"get_neuron_config_cls": lambda: MoENeuronConfig}
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


def open_parallel_state() -> tuple[int, int]:
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


def _annotation_of_config(layer_class: Callable[..., Any]) -> str | None:
    """Return the name of the class that the constructor gives for its `config`; None if it gives none."""
    parameter = inspect.signature(layer_class).parameters.get("config")
    annotation = None if parameter is None else parameter.annotation
    if annotation is None or annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", None)


def find_sites(layer: nn.Module, layout: NxdiLayout) -> dict[str, str]:
    """Return the paths of a layer's sites: its own `sites`, else submodules that layers on NxDI have.

    Rotated queries and keys, and the chosen experts' weights, are not shown: NxD's router gives affinities of all
    experts.
    """
    declared = getattr(layer, "sites", None)
    if declared is not None:
        return dict(declared)
    present = {name for name, _ in layer.named_modules()}
    # Without a mixture of experts of a known name, any name will do: sites below it are dropped at the end.
    moe = next((name for name in _MOE_NAMES if name in present), _MOE_NAMES[0])
    queries = Sharded(dim=-1, blocks=layout.heads.all_query_heads())
    keys = Sharded(dim=-1, blocks=layout.heads.all_kv_heads())
    # A submodule's path, then perhaps `:` and a point, then perhaps a layout, which begins with `@`.
    candidates = {
        Site.INPUT_NORM: _INPUT_NORM,
        Site.Q_PROJ: f"{_QKV}.q_proj{queries}",
        **{site: f"{_QKV}.{site}{keys}" for site in (Site.K_PROJ, Site.V_PROJ)},
        Site.Q_NORM: f"{_ATTENTION}.q_norm{queries}",
        Site.K_NORM: f"{_ATTENTION}.k_norm{keys}",
        Site.ATTN_CONTEXT: f"{_ATTENTION}.o_proj:input{queries}",
        Site.ATTN_DELTA: f"{_ATTENTION}.o_proj",
        Site.ATTN_RESIDUAL: f"{_POST_NORM}:input",
        Site.POST_NORM: _POST_NORM,
        # NxD's router returns logits, affinities and the chosen experts.
        Site.ROUTER_LOGITS: f"{moe}.router:output[0]",
        Site.ROUTER_EXPERTS: f"{moe}.router:output[2]",
        Site.MOE_DELTA: moe,
    }
    paths = {site: text.partition("@")[0].partition(":")[0] for site, text in candidates.items()}
    return {str(site): text for site, text in candidates.items() if paths[site] in present}

"""NxdiLayer: a decoder layer on neuronx-distributed-inference behind the target protocol.

Such a layer takes a boolean mask [B,1,S,S]. B batch, S tokens of this pass, P tokens of the past, H hidden.

The sites of a layer on NxDI: submodules that show them, and values that NxD shows in another form.

| site | NxD's form | shown by |
|---|---|---|
| `router_weights` | affinities of all experts, and the chosen experts | `ChosenWeights` |
| `q_norm`, `k_norm` by `q_layernorm`, `k_layernorm` | one norm for each head | `ShownHeads` |

Such a module is called by a hook on one of the layer's, with the value in mm2's form. A value that replaces it there is
brought back to NxD's form.
B batch, S tokens, T tokens of all rows, N heads, D head_dim, E experts, k experts per token.

Conversions of a checkpoint's layer to the names and shapes of a layer on NxDI, by whom they are.

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
from minimax_tools.errors import TargetError, list_faults
from minimax_tools.model.site_layouts import Sharded
from minimax_tools.model.sites import Site
from neuron.devices.weights import Weight
from neuron.ports.nxdi_application import CHOICE, PortApplication
from neuron.ports.nxdi_layout import NxdiLayout
from neuron.ports.target import ConversionOrigin

logger = logging.getLogger(__name__)


# Path of the port's layer in an `NxdiLayer`.
LAYER = "layer"
_ATTENTION = f"{LAYER}.self_attn"
_QKV = f"{_ATTENTION}.qkv_proj"
_INPUT_NORM, _POST_NORM = f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"
_MOE_NAMES = ("block_sparse_moe", "mlp", "moe", "feed_forward")
_HEAD_NORMS = {Site.Q_NORM: "q_layernorm", Site.K_NORM: "k_layernorm"}


class ChosenWeights(nn.Module):
    """The weights [T,k] of the chosen experts: their affinities, divided by their sum if the port normalises them.

    NxD's experts get the affinities [T,E] of all experts, and divide those of the chosen ones [T,k] themselves.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        routed = getattr(experts, "routed_experts_mlp_config", None)
        self._normalises = bool(getattr(routed, "normalize_top_k_affinities", True))
        experts.register_forward_pre_hook(self._show, with_kwargs=True)

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the weights."""
        return weights

    def _show(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        affinities, chosen = kwargs.get("expert_affinities"), kwargs.get("expert_index")
        if not (isinstance(affinities, torch.Tensor) and isinstance(chosen, torch.Tensor)):
            return None
        chosen = chosen.to(torch.int64)
        weights = affinities.gather(-1, chosen).to(torch.float32)
        if self._normalises:
            # They are no finer than the affinities.
            weights = (weights / weights.sum(dim=-1, keepdim=True)).to(affinities.dtype).to(torch.float32)
        shown = self(weights)
        if shown is weights:
            return None
        replaced = affinities.scatter(-1, chosen, shown.to(affinities.dtype))
        return args, {**kwargs, "expert_affinities": replaced}


class ShownHeads(nn.Module):
    """The output [B,S,N·D] of a norm that is called with heads, [B,S,N,D] or [B,N,S,D]."""

    def __init__(self, norm: nn.Module, *, is_transposed: bool) -> None:
        super().__init__()
        self._is_transposed = is_transposed  # whether heads come before tokens
        norm.register_forward_hook(self._show)

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the norm's output."""
        return normed

    def _show(self, _: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return None
        if output.ndim != 4:
            self(output)
            return None
        by_token = output.transpose(1, 2) if self._is_transposed else output
        flat = by_token.flatten(2)
        shown = self(flat)
        if shown is flat:
            return None
        heads = shown.unflatten(2, by_token.shape[2:])
        return heads.transpose(1, 2) if self._is_transposed else heads


def find_sites(module: nn.Module, layout: NxdiLayout) -> dict[str, str]:
    """Return the paths of the sites: the `sites` of the port's class, else submodules that layers on NxDI have.

    `module` holds the port's layer as `layer`, and gets the modules that show what NxD holds in another form. Rotated
    queries and keys are not shown.
    """
    layer = module.get_submodule(LAYER)
    declared = getattr(layer, "sites", None)
    if declared is not None:
        return {site: f"{LAYER}.{path}" for site, path in declared.items()}
    present = dict(module.named_modules())
    # Without a mixture of experts of a known name, any name will do: sites below it are dropped at the end.
    moe = next((name for name in _MOE_NAMES if f"{LAYER}.{name}" in present), _MOE_NAMES[0])
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
        Site.ROUTER_LOGITS: f"{LAYER}.{moe}.router:output[0]",
        Site.ROUTER_EXPERTS: f"{LAYER}.{moe}.router:output[2]",
        Site.MOE_DELTA: f"{LAYER}.{moe}",
    }
    paths = {site: text.partition("@")[0].partition(":")[0] for site, text in candidates.items()}
    found = {site: text for site, text in candidates.items() if paths[site] in present}
    for site, name in _HEAD_NORMS.items():
        norm = present.get(f"{_ATTENTION}.{name}")
        if norm is not None and site not in found:
            is_transposed = bool(getattr(present[_ATTENTION], "post_transpose_layernorm", False))
            module.add_module(f"shown_{site}", ShownHeads(norm, is_transposed=is_transposed))
            found[site] = f"shown_{site}{queries if site is Site.Q_NORM else keys}"
    experts = present.get(f"{LAYER}.{moe}.expert_mlps")
    if experts is not None:
        module.add_module(f"shown_{Site.ROUTER_WEIGHTS}", ChosenWeights(experts))
        found[Site.ROUTER_WEIGHTS] = f"shown_{Site.ROUTER_WEIGHTS}"
    return {str(site): text for site, text in found.items()}


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


# Variable that tells NxD to compute on the CPU.
CPU_MODE_VARIABLE = "NXD_CPU_MODE"


class NxdiLayer(nn.Module):
    """A decoder layer on NxDI behind the target protocol.

    Args:
        layer: The port's layer.
        conversion: The way its weights are made.
        layout: The layout of this rank's weights.
        neuron_config: NxDI's config of the device: the layer reads its stage there.
        is_cpu_mode: Whether NxD was set to compute on the CPU.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        conversion: Conversion,
        layout: NxdiLayout,
        neuron_config: Any,
        is_cpu_mode: bool,
    ) -> None:
        super().__init__()
        self.layer = layer
        self._conversion = conversion
        self._neuron_config = neuron_config
        self._is_cpu_mode = is_cpu_mode
        self.sites = find_sites(self, layout)

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

    @property
    def convert_state_dict(self) -> Conversion:
        """The conversion that fills the layer."""
        return self._conversion

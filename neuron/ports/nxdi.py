"""Ports built on neuronx-distributed-inference: `--target nxdi:package.module:DecoderLayerClass`.

NxDI stands for that package, NxD for neuronx-distributed, on which it is built. A layer there takes NxDI's config and a
boolean mask [B,1,S,S], and holds weights in NxDI's layout. `NxdiTarget` builds it as NxDI builds a model; `NxdiLayer`
translates between the layer and the target protocol. A site that NxD shows in another form is shown by a module of
mm2's: a hook calls it with the value in mm2's form. Written against NxDI 0.9 and 0.10.
B batch, S tokens of this pass, P tokens of the past, H hidden, T tokens of all rows, N heads, D head_dim, E experts,
k experts per token.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from torch import nn

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.errors import TargetError, list_faults
from minimax_tools.machine.native_output import native_output_dropped, output_set_aside
from minimax_tools.model.site_layouts import Sharded
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from neuron.devices.weights import Weight
from neuron.ports.cpu_mode import NXD_CPU_MODE, refuse_other_mode
from neuron.ports.hub_names import hub_named
from neuron.ports.nxdi_application import CHOICE, PortApplication, find_application
from neuron.ports.nxdi_config import make_nxdi_config
from neuron.ports.nxdi_layout import NxdiLayout
from neuron.ports.sources import ImportedPort
from neuron.ports.target import ConversionOrigin, Target

logger = logging.getLogger(__name__)


# Path of the port's layer in an `NxdiLayer`.
_LAYER = "layer"
_ATTENTION = "self_attn"
_QKV = f"{_ATTENTION}.qkv_proj"
_INPUT_NORM, _POST_NORM = "input_layernorm", "post_attention_layernorm"
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


def find_sites(layer: nn.Module, layout: NxdiLayout) -> dict[str, str]:
    """Return the paths of the sites: the `sites` of the port's class, else submodules that layers on NxDI have.

    The layer gets modules that show what NxD holds in another form. Rotated queries and keys are not shown.
    """
    declared: Mapping[str, str] | None = getattr(layer, "sites", None)
    if declared is not None:
        return dict(declared)
    present = dict(layer.named_modules())
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
    found = {site: text for site, text in candidates.items() if paths[site] in present}
    for site, name in _HEAD_NORMS.items():
        norm = present.get(f"{_ATTENTION}.{name}")
        if norm is not None and site not in found:
            is_transposed = bool(getattr(present[_ATTENTION], "post_transpose_layernorm", False))
            layer.add_module(f"shown_{site}", ShownHeads(norm, is_transposed=is_transposed))
            found[site] = f"shown_{site}{queries if site is Site.Q_NORM else keys}"
    experts = present.get(f"{moe}.expert_mlps")
    if experts is not None:
        layer.add_module(f"shown_{Site.ROUTER_WEIGHTS}", ChosenWeights(experts))
        found[Site.ROUTER_WEIGHTS] = f"shown_{Site.ROUTER_WEIGHTS}"
    return {str(site): text for site, text in found.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversion:
    """A way to make the weights of an `NxdiLayer`."""

    # Returns the weights by the names of the port's layer, from tensors, config and the layer's number.
    make: Callable[[LayerTensors, Any, int], Mapping[str, Weight]]
    reads_in_place: bool = False  # whether weights are read into their storage; see `read_in_place`
    takes_own_names: bool = False  # see `hub_names`

    def __call__(self, tensors: LayerTensors, config: Any, layer_idx: int) -> dict[str, Weight]:
        """Return the weights by the names of an `NxdiLayer`; `config` has the keys of config.json as attributes."""
        return {f"{_LAYER}.{name}": weight for name, weight in self.make(tensors, config, layer_idx).items()}


def convert_by_application(
    application: PortApplication, layer: nn.Module, nxdi_config: Any, layout: NxdiLayout
) -> Conversion:
    """Return the conversion of the port's application, as a deployment converts: with its cast and its sharding.

    A weight that none of them gives stays as it was built.
    """

    def make(tensors: LayerTensors, config: Any, layer_idx: int) -> Mapping[str, Weight]:
        places = layer.state_dict(keep_vars=True)
        layout.warn_of_unused(places, tensors)
        rank, degree = layout.rank, layout.tp_degree
        given = hub_named(tensors, layout.spec.family.stored_names)
        found = application.convert(given, layer, nxdi_config, rank=rank, tp_degree=degree)
        missing = [name for name in places if name not in found]
        if missing:
            logger.warning(
                "The port's conversion gives nothing for %s: it stays as the layer's constructor made it.",
                list_faults(missing),
            )
        # NxD drops names that the layer lacks, and NxDI's loader asks for none.
        return {name: found[name] if name in found else _as_built(place) for name, place in places.items()}

    return Conversion(make=make, takes_own_names=True)


def convert_by_table(layer: nn.Module, layout: NxdiLayout) -> Conversion:
    """Return the conversion by mm2's table; weights are read when they are loaded."""

    def make(tensors: LayerTensors, config: Any, layer_idx: int) -> Mapping[str, Weight]:
        places = layer.state_dict(keep_vars=True)
        layout.warn_of_unused(places, tensors)
        return layout.weights(places, tensors)

    return Conversion(make=make, reads_in_place=True, takes_own_names=True)


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


class NxdiLayer(nn.Module):
    """A decoder layer on NxDI behind the target protocol; `convert_state_dict` fills it.

    The layer reads its stage in `neuron_config`, NxDI's config of the device. `is_cpu_mode` says whether NxD was set to
    compute on the CPU.
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
        self.convert_state_dict = conversion
        self._neuron_config = neuron_config
        self._is_cpu_mode = is_cpu_mode
        self.sites = {site: f"{_LAYER}.{path}" for site, path in find_sites(layer, layout).items()}

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """Run the layer on [B,S,H], mask [B,P+S] of 0/1 and positions [B,S]; return its output [B,S,H] first."""
        device = hidden_states.device
        refuse_other_mode(
            NXD_CPU_MODE,
            f"the port computes on {device}",
            is_on_cpu=device.type == "cpu",
            is_cpu_mode=self._is_cpu_mode,
        )
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


PREFIX = "nxdi:"
_LOG_LEVEL_VARIABLE = "NXD_LOG_LEVEL"
# Second name under which NxD registers a weight.
_MASTER_WEIGHT = "master_weight"
_INSTALL_STEP = (
    "Run in the Neuron SDK's virtual environment for NxD Inference, or install it: pip install "
    "--extra-index-url https://pip.repos.neuron.amazonaws.com neuronx-distributed-inference."
)


@dataclass(frozen=True, kw_only=True)
class NxdiTarget(ImportedPort, Target):
    """A decoder layer on neuronx-distributed-inference: a class that takes NxDI's config and the layer's number."""

    prefix = PREFIX
    forms = f"{PREFIX}PATH.py:NAME or {PREFIX}package.module:NAME"
    # On a device, its attention kernels know no mask: they take all columns before a token for earlier tokens.
    pads_right = True
    divides_weights = True

    @classmethod
    def require_library(cls) -> None:
        """Raise TargetError unless NxDI can be imported."""
        require_nxdi()

    @cached_property
    def application(self) -> PortApplication | None:
        """The port's class of the whole model; None for none that converts."""
        return find_application(self.factory, self._module)

    @property
    def _module(self) -> ModuleType:
        assert self.module is not None, "it was imported from one"
        return self.module

    @property
    def is_reused(self) -> bool:
        """True if the class sets `reuse`."""
        return bool(getattr(self.factory, "reuse", False))

    @property
    def fills_storage(self) -> bool:
        """True if mm2's table fills the layer: it reads in place."""
        return self.application is None and not self._converts_itself

    @property
    def conversion(self) -> ConversionOrigin:
        """The origin of the conversion that fills the layer."""
        return find_origin(self.factory, self._module, self.application)

    @property
    def _converts_itself(self) -> bool:
        return hasattr(self.factory, "convert_state_dict")

    def make(self, config: Any, layer_idx: int) -> NxdiLayer:
        """Build the layer with NxDI's config."""
        degree, rank = _open_parallel_state()
        nxdi_config = make_nxdi_config(
            self.factory,
            self._module,
            config,
            options=self.port_config,
            dtype=torch.get_default_dtype(),  # `Target.build` sets it to the run's dtype
            tp_degree=degree,
        )
        with aot_mode():
            layer = self.factory(nxdi_config, layer_idx)
        _drop_master_weights(layer)
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
            own = getattr(layer, "convert_state_dict", None) or self.factory.convert_state_dict  # type: ignore[attr-defined]
            return Conversion(make=own)
        if self.application is None:
            return convert_by_table(layer, layout)
        self.application.cast_module(layer, nxdi_config)
        return convert_by_application(self.application, layer, nxdi_config, layout)


def require_nxdi() -> None:
    """Raise TargetError unless neuronx-distributed-inference can be imported."""
    # The level of its loggers is read once, at the import, where they also take standard output for theirs.
    os.environ.setdefault(_LOG_LEVEL_VARIABLE, "warning")
    try:
        with output_set_aside():
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


@contextmanager
def aot_mode() -> Iterator[None]:
    """Let NxD build modules in the block as for ahead-of-time (AOT) compilation, in which it draws no random weights.

    Else NxD would draw them whole in float32, 10 GB for a full-size layer, only for loading to overwrite them.
    """
    from neuronx_distributed.parallel_layers import parallel_state

    old_mode = parallel_state.get_aot_mode()
    parallel_state.set_aot_mode(True)
    try:
        yield
    finally:
        parallel_state.set_aot_mode(old_mode)


def _drop_master_weights(layer: object) -> None:
    """Drop a second name: in AOT mode NxD registers weights twice, and strict loading would ask for both."""
    for module in layer.modules() if isinstance(layer, nn.Module) else ():
        master = module._parameters.get(_MASTER_WEIGHT)
        if master is not None and master is getattr(module, "weight", None):
            module._parameters[_MASTER_WEIGHT] = None

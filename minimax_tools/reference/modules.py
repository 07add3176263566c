"""Recording of mm2's sites in transformers' model, and what comes before it: installed packages and config.

`transformers` is imported inside the functions, so that this file can be imported on a host without it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from minimax_tools.capture.recorder import Recorder, copy_to_host
from minimax_tools.capture.taps import Tap
from minimax_tools.errors import MissingExtraError
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.family import Family
from minimax_tools.model.graph import LayerGraph
from minimax_tools.model.sites import Site

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The module that shows each site, relative to a decoder layer. q_rope and k_rope are inputs of no module: only the
# attention function gets them (see `_recording_attention`).
LAYER_TAPS: Mapping[Site, Tap] = MappingProxyType(
    {
        Site.INPUT: Tap(path="input_layernorm", point="input"),
        Site.INPUT_NORM: Tap(path="input_layernorm"),
        Site.Q_PROJ: Tap(path="self_attn.q_proj"),
        Site.K_PROJ: Tap(path="self_attn.k_proj"),
        Site.V_PROJ: Tap(path="self_attn.v_proj"),
        Site.Q_NORM: Tap(path="self_attn.q_norm"),
        Site.K_NORM: Tap(path="self_attn.k_norm"),
        Site.ATTN_CONTEXT: Tap(path="self_attn.o_proj", point="input"),
        Site.ATTN_DELTA: Tap(path="self_attn.o_proj"),
        Site.ATTN_RESIDUAL: Tap(path="post_attention_layernorm", point="input"),
        Site.POST_NORM: Tap(path="post_attention_layernorm"),
        Site.ROUTER_LOGITS: Tap(path="mlp.gate", index=0),
        Site.ROUTER_WEIGHTS: Tap(path="mlp.gate", index=1),
        Site.ROUTER_EXPERTS: Tap(path="mlp.gate", index=2),
        Site.ROUTED_DELTA: Tap(path="mlp.experts"),
        Site.SHARED_DELTA: Tap(path="mlp.shared_experts"),
        Site.MOE_DELTA: Tap(path="mlp"),
        Site.MLP_DELTA: Tap(path="mlp"),
        Site.OUTPUT: Tap(path=""),
    }
)
# What transformers adds to the type of a model for that of its text model alone.
_TEXT = "_text"
# A callback that gets the queries [B,N,S,D] and keys [B,K,S,D] after RoPE: N heads, K kv heads, D head_dim.
RecordRope = Callable[[torch.Tensor, torch.Tensor], None]


def require_golden_extra(needed_for: str) -> None:
    """Check that transformers and accelerate are installed, and set USE_TORCH_XLA=0 for accelerate.

    Call it before accelerate is imported, by transformers too. `needed_for` begins the error's text.

    Raises:
        MissingExtraError: One of them is not installed.
    """
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra="golden", needed_for=needed_for)
    # Goldens run on torch's own devices; accelerate would start torch_xla where it is installed. A user's value stays.
    os.environ.setdefault("USE_TORCH_XLA", "0")


def modeling_class(family: Family, name: str) -> Any:
    """Return a class of transformers for a family, by the name that follows its prefix, such as `DecoderLayer`."""
    modeling = importlib.import_module(
        f"transformers.models.{family.model_type}.modeling_{family.model_type}"
    )
    return getattr(modeling, family.transformers_prefix + name)


def family_of_config(config: PretrainedConfig) -> Family | None:
    """Return the family of a model's config, or of its text model's; None if mm2 does not know it."""
    return FAMILIES.get(config.model_type.removesuffix(_TEXT))


def loading_arguments(family: Family) -> dict[str, Any]:
    """Return arguments of `from_pretrained` by which the text model alone takes its weights from a checkpoint."""
    from transformers import conversion_mapping

    if family.text_key is None:
        return {}
    text_type = family.model_type + _TEXT
    if conversion_mapping.get_checkpoint_conversion_mapping(text_type) is None:
        # transformers converts the weights of the whole model; those of its text model lie under other names.
        whole = conversion_mapping.get_checkpoint_conversion_mapping(family.model_type)
        conversion_mapping.register_checkpoint_conversion_mapping(text_type, whole)
    return {"key_mapping": {f"^{family.stored_names.prefix}": ""}}


def read_config(folder: Path, *, num_hidden_layers: int) -> PretrainedConfig:
    """Read transformers' config of a checkpoint, cut to its first layers."""
    from transformers import AutoConfig

    # Of a model that sees images too, the text model's.
    config: PretrainedConfig = AutoConfig.from_pretrained(folder).get_text_config()
    for name, kinds in vars(config).items():
        # Lists with a kind of each layer, such as `layer_types`.
        if isinstance(kinds, list) and len(kinds) == config.num_hidden_layers and name.endswith("_types"):
            setattr(config, name, kinds[:num_hidden_layers])
    config.num_hidden_layers = num_hidden_layers
    return config


@contextlib.contextmanager
def recording_layer(
    layer: torch.nn.Module, *, sites: Iterable[Site], graph: LayerGraph, attn_implementation: str
) -> Iterator[dict[Site, torch.Tensor]]:
    """Record sites of a decoder layer that runs in the block; yield the tensors, filled as they are computed.

    Sites that the layer lacks are left out.

    Tensors are copied to the CPU at once, in transformers' shapes.

    Raises:
        KeyError: transformers has no attention implementation of that name.
    """
    wanted = frozenset(sites) & frozenset(graph.sites)
    taps = {site: tap for site, tap in LAYER_TAPS.items() if site in wanted}
    recorder = Recorder(layer, taps, keep=copy_to_host)

    def record_rope(query: torch.Tensor, key: torch.Tensor) -> None:
        for site, tensor in ((Site.Q_ROPE, query), (Site.K_ROPE, key)):
            if site in wanted:
                recorder.record(site, tensor)

    with recorder, _recording_attention(layer.get_submodule("self_attn"), record_rope, attn_implementation):
        yield recorder.tensors


@contextlib.contextmanager
def _recording_attention(
    module: torch.nn.Module, record: RecordRope, attn_implementation: str
) -> Iterator[None]:
    """Call `record` with the queries and keys of one attention module, just before attention uses them."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager_attention_forward = importlib.import_module(type(module).__module__).eager_attention_forward
    # `eager` has no entry: it is the modeling file's own function, until an entry takes its place. Other names without
    # an entry are refused: the entry made below would hide the mistake.
    before = ALL_ATTENTION_FUNCTIONS.get(attn_implementation)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(attn_implementation, eager_attention_forward)

    def record_and_attend(
        caller: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if caller is module:
            record(query, key)
        return attend(caller, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[attn_implementation] = record_and_attend
    try:
        yield
    finally:
        if before is None:
            del ALL_ATTENTION_FUNCTIONS[attn_implementation]
        else:
            ALL_ATTENTION_FUNCTIONS[attn_implementation] = before

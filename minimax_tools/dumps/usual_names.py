"""Usual names: places of MiniMax-M2's sites under the module names of the hub, transformers and NxDI.

Of a site's places, the first that a dump holds counts; one of them may be a sum of several. `place` explains their
notation. Facts that differ between models of a tool, such as the widths of a fused projection, need a user's map.
"""

from __future__ import annotations

from collections.abc import Mapping

from minimax_tools.dumps.place import SitePlace
from minimax_tools.model.site_layouts import Replicated, Sharded, SiteLayout
from minimax_tools.model.sites import ModelSite, Site

# Places whose tensors are added up; most often one.
SumOfPlaces = tuple[SitePlace, ...]

INPUT_IDS, ATTENTION_MASK = "input_ids", "attention_mask"
# The input of the final norm: the last layer's output.
HEAD_INPUT = "head_input"

_LAYER = "layers.{layer}"
_MOES = ("block_sparse_moe", "mlp", "moe")  # names of the MoE block in different models

_NAMES: Mapping[Site | ModelSite | str, tuple[str, ...]] = {
    Site.INPUT: (f"{_LAYER}:input", f"{_LAYER}.input_layernorm:input"),
    Site.INPUT_NORM: (f"{_LAYER}.input_layernorm",),
    Site.Q_PROJ: (f"{_LAYER}.self_attn.q_proj", f"{_LAYER}.self_attn.qkv_proj.q_proj"),
    Site.K_PROJ: (f"{_LAYER}.self_attn.k_proj", f"{_LAYER}.self_attn.qkv_proj.k_proj"),
    Site.V_PROJ: (f"{_LAYER}.self_attn.v_proj", f"{_LAYER}.self_attn.qkv_proj.v_proj"),
    Site.Q_NORM: (f"{_LAYER}.self_attn.q_norm", f"{_LAYER}.self_attn.q_layernorm"),
    Site.K_NORM: (f"{_LAYER}.self_attn.k_norm", f"{_LAYER}.self_attn.k_layernorm"),
    # Rotated queries and keys have no usual place: no module returns them.
    Site.ATTN_CONTEXT: (f"{_LAYER}.self_attn.o_proj:input",),
    Site.ATTN_DELTA: (f"{_LAYER}.self_attn.o_proj", f"{_LAYER}.self_attn"),
    Site.ATTN_RESIDUAL: (f"{_LAYER}.post_attention_layernorm:input",),
    Site.POST_NORM: (f"{_LAYER}.post_attention_layernorm",),
    Site.ROUTER_LOGITS: tuple(
        f"{_LAYER}.{moe}.{name}"
        for moe in _MOES
        for name in ("gate", "router.linear_router", "router:output[0]")
    ),
    Site.ROUTER_EXPERTS: tuple(
        f"{_LAYER}.{moe}.{name}:output[2]" for moe in _MOES for name in ("gate", "router")
    ),
    # transformers' router returns the weights of the chosen experts; for NxDI's see `AFFINITIES`.
    Site.ROUTER_WEIGHTS: tuple(f"{_LAYER}.{moe}.gate:output[1]" for moe in _MOES),
    Site.MOE_DELTA: tuple(f"{_LAYER}.{moe}" for moe in _MOES),
    # A layer's output is also the input of the next layer.
    Site.OUTPUT: (f"{_LAYER}", "layers.{next}:input", "layers.{next}.input_layernorm:input"),
    ModelSite.EMBEDDING: ("model.embed_tokens", "embed_tokens"),
    ModelSite.FINAL_NORM: ("model.norm", "norm"),
    ModelSite.LOGITS: ("lm_head", ":output[logits]", ":output[next_token_logits]"),
    INPUT_IDS: (
        ":input[input_ids]",
        "model:input[input_ids]",
        "input_ids",
        "model.embed_tokens:input",
        "embed_tokens:input",
    ),
    ATTENTION_MASK: (":input[attention_mask]", "model:input[attention_mask]"),
    HEAD_INPUT: ("model.norm:input", "norm:input"),
}
# Serving engines compute these only for the tokens to sample from.
BEHIND_LAYERS = (ModelSite.FINAL_NORM, ModelSite.LOGITS)
# What a layer's module returns: its output, or one of two addends of it.
LAYER_ITSELF = SitePlace.parse(_LAYER)
# In place of the above for models that fuse each residual add into the norm behind it, as vLLM's and SGLang's do. Their
# norms and layers take and return pairs: a value, and the residual that it is to be added to. A tuple is a sum.
_FUSED_PAIRS: Mapping[Site, tuple[tuple[str, ...], ...]] = {
    Site.INPUT: (),  # read as the output of the layer before
    Site.INPUT_NORM: ((f"{_LAYER}.input_layernorm:output[0]",),),
    Site.ATTN_RESIDUAL: ((f"{_LAYER}.post_attention_layernorm:output[1]",),),
    Site.POST_NORM: ((f"{_LAYER}.post_attention_layernorm:output[0]",),),
    # SGLang 0.5.23 passes the residual beside the modules: the norm behind the layer returns their sum.
    Site.OUTPUT: (
        (f"{_LAYER}:output[0]", f"{_LAYER}:output[1]"),
        ("layers.{next}.input_layernorm:output[1]",),
    ),
}
# Affinities of all experts and the chosen experts, from which `router_weights` are computed: what NxD's router returns.
AFFINITIES = tuple(
    (
        SitePlace.parse(f"{_LAYER}.{moe}.router:output[1]"),
        SitePlace.parse(f"{_LAYER}.{moe}.router:output[2]"),
    )
    for moe in _MOES
)
_NXDI_QUERIES = f"{_LAYER}.self_attn.qkv_proj:output[0]"
# Sites whose heads are divided among ranks along the last dim.
_SPLIT_HEADS = (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ, Site.Q_NORM, Site.K_NORM, Site.ATTN_CONTEXT)


def usual_places(
    format_name: str, *, has_fused_residuals: bool
) -> Mapping[Site | ModelSite | str, tuple[SumOfPlaces, ...]]:
    """Return the places of each site, the likeliest first; also of token ids, mask and `HEAD_INPUT`.

    Args:
        format_name: The dump's format.
        has_fused_residuals: Whether norms return the residual stream beside the normed value.
    """
    places: dict[Site | ModelSite | str, tuple[SumOfPlaces, ...]] = {
        site: tuple((SitePlace.parse(name),) for name in names) for site, names in _NAMES.items()
    }
    if format_name == "nxdi":
        # Its fused projection returns queries, keys and values apart; the capture keeps the first.
        places[Site.Q_PROJ] += ((SitePlace.parse(_NXDI_QUERIES),),)
    if has_fused_residuals:
        for site, names in _FUSED_PAIRS.items():
            places[site] = tuple(tuple(SitePlace.parse(name) for name in terms) for terms in names)
    if format_name == "vllm-neuron":
        # It keeps the first of several outputs. `stream_proof` finds out whether that is a layer's whole output.
        places[Site.OUTPUT] = ()
        # Ranks may add up o_proj's outputs behind the module: what attention itself returns is the sum.
        places[Site.ATTN_DELTA] = tuple(reversed(places[Site.ATTN_DELTA]))
        for site in Site:
            # A tensor that the model's code gives to `capture_tensor` under the site's name.
            by_hand = (SitePlace.parse(f"manual.{_LAYER}.{site}"),)
            places[site] = (*places.get(site, ()), by_hand)
    return places


def usual_layout(site: Site | ModelSite | str) -> SiteLayout:
    """Return the layout of a site without a declared one: heads are divided, all else is whole on each rank."""
    if site in _SPLIT_HEADS:
        return Sharded(dim=-1)
    return Sharded(dim=1) if site in (Site.Q_ROPE, Site.K_ROPE) else Replicated()

"""The sites that a port shows: declared by its `sites` attribute, or found by usual names of submodules.

On several ranks, the pieces of a declared site are assembled by its layout. A site found by name counts only if all
ranks have the same tensor there. A whole port shows its layers, each with an `Exposure`, embedding and final norm.
The argument `what` names target, layer or site in errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from minimax_tools.capture.recorder import shape_to_batch
from minimax_tools.capture.taps import SITE_FORMS, Tap, verify_taps
from minimax_tools.errors import Mm2Error, TargetError
from minimax_tools.model.graph import LayerGraph, ModelGraph
from minimax_tools.model.site_layouts import (
    PlaceNotation,
    Replicated,
    Sharded,
    SiteLayout,
    are_equal_bits,
    parse_layout,
)
from minimax_tools.model.sites import ModelSite, Site, parse_site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.stored_dtype import dtype_name
from neuron.devices.ranks import Ranks
from neuron.ports.target import port_errors

# Usual names of submodules, tried in this order.
_ATTENTION = ("self_attn", "attention", "attn")
_MOE = ("block_sparse_moe", "mlp", "moe", "feed_forward")
_INPUT_NORM = ("input_layernorm", "input_norm", "attention_norm")
_GATE = ("gate", "router", "router.linear_router")
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")
_POST_NORM = ("post_attention_layernorm", "post_attention_norm", "post_norm", "ffn_norm")

# Sites that every layer shows. The empty path is the layer itself.
_ALWAYS = {Site.INPUT: Tap(path="", point="input"), Site.OUTPUT: Tap(path="")}
_SITES_STEP = "Correct the port's `sites`, or leave it out: then submodules with the usual names are found."


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """The sites of a port's module."""

    taps: Mapping[Site, Tap]  # the place in the module at which each site is recorded
    declared: frozenset[Site]  # sites in the port's `sites`, and the output; the others were found by name
    layouts: Mapping[Site, SiteLayout] = field(default_factory=dict)  # over ranks, as the port declares them

    def accepts(
        self, site: Site, tensor: torch.Tensor, spec: ModelSpec, batch_shape: tuple[int, int]
    ) -> bool:
        """Decide whether a recorded tensor may stand for a site; `batch_shape` is batch size and sequence length."""
        # Another shape at a declared site is the port's fault, to be judged. At a site found by name, the name misled.
        return site in self.declared or tuple(tensor.shape) == site_shape(site, spec, batch_shape)

    def assemble(
        self,
        site: Site,
        pieces: Sequence[torch.Tensor],
        batch_shape: tuple[int, int],
        *,
        head_dim: int,
        what: str,
    ) -> torch.Tensor | None:
        """Assemble a site from the ranks' pieces, in rank order and on the CPU; None if their layout is unknown."""
        if len(pieces) > 1 and site in self.declared:
            tensor = self.layouts.get(site, Replicated()).assemble(pieces, what=what)
        elif all(are_equal_bits(pieces[0], piece) for piece in pieces[1:]):
            tensor = pieces[0]
        else:
            # The pieces may be parts or sums: a guess could be wrong.
            return None
        return shape_to_batch(site, tensor, batch_shape, head_dim=head_dim)

    def cut(self, site: Site, tensor: torch.Tensor, *, ranks: Ranks, what: str) -> torch.Tensor:
        """Cut a rank's piece from a site's whole tensor, such as a golden's value that replaces the port's own.

        With heads, the tensor and the piece are [B,heads,S,D]; the layout's dim is that of the port's own tensor.
        """
        if not ranks.are_several:
            return tensor
        if site.has_heads_dim:
            self.require_heads(site, what=what)
        layout = self.layouts.get(site, Replicated())
        # Heads are the only division of such a site that a rank is given: dim 2 holds them in [B,S,heads,D].
        is_tokens_first = site.has_heads_dim and isinstance(layout, Sharded) and layout.dim in (2, -2)
        whole = tensor.transpose(1, 2) if is_tokens_first else tensor
        piece = layout.cut(whole, rank=ranks.rank, num_ranks=ranks.degree, what=what)
        return piece.transpose(1, 2).contiguous() if is_tokens_first else piece

    def require_heads(self, site: Site, *, what: str) -> None:
        """Raise TargetError unless the port declares which heads of a site a rank holds."""
        if site not in self.declared:
            raise TargetError(
                f"{what}: which heads a rank holds cannot be told",
                expected=f"{site} among the port's `sites`, with its layout, such as '@shard(1)'",
                found="no such site",
                next_step="Name it, or run on one rank.",
            )


def find_exposure(
    module: nn.Module,
    *,
    what: str,
    declared: Mapping[str, str] | None = None,
    kind: LayerGraph | None = None,
) -> Exposure:
    """Find the sites that `module` shows; `input` and `output` are always among them: the layer's own.

    `declared` takes the place of the module's attribute `sites`, if it has none. Sites that layers of this `kind` do
    not have are left out: a port may name those of dense layers and of others together. Without `kind`, names tell it.

    Raises:
        TargetError: `sites` names an unknown site or a submodule that does not exist.
    """
    own = _read_declared(module, what=what)
    # An empty mapping says that the module shows its output alone.
    declared = declared if own is None else own
    if declared is None:
        taps = _find_by_name(module, is_dense=None if kind is None else kind.is_dense)
        return Exposure(taps={**taps, **_ALWAYS}, declared=frozenset((Site.OUTPUT,)))
    if kind is not None:
        absent = frozenset(kind.model.sites) - frozenset(kind.sites)
        declared = {name: text for name, text in declared.items() if name not in absent}
    return read_exposure(module, declared, what=what)


def read_exposure(module: nn.Module, declared: Mapping[str, str], *, what: str) -> Exposure:
    """Return the sites that `declared` names, and the layer's own input and output."""
    taps, layouts = _parse_sites(declared, what=what)
    verify_taps(module, taps)
    for site in _ALWAYS:
        if not isinstance(layouts.get(site, Replicated()), Replicated):
            raise TargetError(
                f"{what}: sites[{str(site)!r}] is {layouts[site]}",
                expected="the whole of it on every rank",
                found=str(layouts[site]),
                next_step="Reduce or gather before the layer returns.",
            )
    return Exposure(taps={**taps, **_ALWAYS}, declared=frozenset((*taps, Site.OUTPUT)), layouts=layouts)


def site_shape(site: Site, spec: ModelSpec, batch_shape: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of a site for a batch of this size and sequence length."""
    batch, sequence = batch_shape
    if site is Site.Q_ROPE:
        return (batch, spec.num_attention_heads, sequence, spec.head_dim)
    if site is Site.K_ROPE:
        return (batch, spec.num_key_value_heads, sequence, spec.head_dim)
    widths = {
        Site.Q_PROJ: spec.query_width,
        Site.Q_NORM: spec.query_width,
        Site.ATTN_CONTEXT: spec.query_width,
        Site.K_PROJ: spec.key_value_width,
        Site.K_NORM: spec.key_value_width,
        Site.V_PROJ: spec.key_value_width,
        Site.ROUTER_LOGITS: spec.num_local_experts,
        Site.ROUTER_EXPERTS: spec.num_experts_per_tok,
        Site.ROUTER_WEIGHTS: spec.num_experts_per_tok,
    }
    return (batch, sequence, widths.get(site, spec.hidden_size))


def router_dtypes(module: nn.Module) -> dict[str, str]:
    """Return the dtypes of the router's gate and correction bias, found by their usual names."""
    dtypes: dict[str, str] = {}
    for name, tensor in module.state_dict().items():
        if name.endswith("correction_bias"):
            dtypes["correction_bias"] = dtype_name(tensor.dtype)
        elif name.endswith(("gate.weight", "router.weight", "linear_router.weight")):
            dtypes["router_gate"] = dtype_name(tensor.dtype)
    return dtypes


def _read_declared(module: nn.Module, *, what: str) -> dict[str, str] | None:
    failed = f"{what}: sites cannot be read"
    with port_errors(failed, activity=f"reading sites of {what}", next_step=_SITES_STEP):
        declared = getattr(module, "sites", None)
    if declared is None:
        return None
    if not isinstance(declared, Mapping) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in declared.items()
    ):
        raise TargetError(
            f"{what}: sites is no mapping of names",
            expected="site names to paths like 'self_attn.q_proj'",
            found=repr(declared)[:80],
            next_step=_SITES_STEP,
        )
    return dict(declared)


def _parse_sites(declared: Mapping[str, str], *, what: str) -> tuple[dict[Site, Tap], dict[Site, SiteLayout]]:
    """Read a port's `sites`, such as {"q_proj": "self_attn.q_proj@shard(-1)"}: taps, and layouts if given."""
    taps, layouts = {}, {}
    for name, text in declared.items():
        try:
            site = parse_site(name)
            notation = PlaceNotation.parse(text, example=SITE_FORMS)
            taps[site] = Tap.of(notation, text=text)
            if notation.layout is not None:
                layouts[site] = notation.layout
        except Mm2Error as error:
            raise TargetError(
                f"{what}: sites[{name!r}] = {text!r} cannot be used: {error.what}",
                expected=error.expected,
                next_step=_SITES_STEP,
            ) from error
    return taps, layouts


def _find_by_name(module: nn.Module, *, is_dense: bool | None) -> dict[Site, Tap]:
    """Find sites at submodules with usual names, as far as the module has them; None if names tell its kind."""
    present = {name for name, _ in module.named_modules()}
    attention, moe = _first_present(present, _ATTENTION), _first_present(present, _MOE)
    input_norm, post_norm = _first_present(present, _INPUT_NORM), _first_present(present, _POST_NORM)
    candidates: dict[Site, Tap] = {}
    if input_norm:
        candidates[Site.INPUT_NORM] = Tap(path=input_norm)
    if attention:
        for site in (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ, Site.Q_NORM, Site.K_NORM):
            candidates[site] = Tap(path=f"{attention}.{site}")
        candidates[Site.ATTN_CONTEXT] = Tap(path=f"{attention}.o_proj", point="input")
        candidates[Site.ATTN_DELTA] = Tap(path=attention)
    if post_norm:
        candidates[Site.ATTN_RESIDUAL] = Tap(path=post_norm, point="input")
        candidates[Site.POST_NORM] = Tap(path=post_norm)
    if moe:
        candidates |= _find_in_moe(present, moe, is_dense=is_dense)
    return {site: tap for site, tap in candidates.items() if tap.path in present}


def _find_in_moe(present: set[str], moe: str, *, is_dense: bool | None) -> dict[Site, Tap]:
    """Find sites of a mixture of experts, or of the dense MLP in its place, at the path `moe`."""
    gate = _first_present(present, tuple(f"{moe}.{name}" for name in _GATE))
    if is_dense is None:
        is_dense = gate is None and f"{moe}.down_proj" in present
    if is_dense:
        return {Site.MLP_DELTA: Tap(path=moe)}
    candidates = {Site.MOE_DELTA: Tap(path=moe)}
    if gate:
        candidates[Site.ROUTER_LOGITS] = Tap(path=gate)
    if shared := _first_present(present, tuple(f"{moe}.{name}" for name in _SHARED)):
        candidates |= {Site.SHARED_DELTA: Tap(path=shared), Site.ROUTED_DELTA: Tap(path=f"{moe}.experts")}
    return candidates


def _first_present(present: set[str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in present), None)


# Names in a whole port's `sites` that are no sites: its list of layers, and its cache's layout over ranks.
LAYERS, CACHE = "layers", "cache"

# Usual names, tried in this order.
_LAYERS = ("model.layers", "layers", "model.decoder.layers", "transformer.h", "decoder.layers")
_USUAL: Mapping[ModelSite, tuple[str, ...]] = {
    ModelSite.EMBEDDING: ("embed_tokens", "embedding", "embeddings", "tok_embeddings", "wte"),
    ModelSite.FINAL_NORM: ("norm", "final_norm", "final_layernorm", "ln_f"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExposure:
    """The sites of a whole port's module."""

    layers: tuple[nn.Module, ...]  # the decoder layers, in order; empty if they are not shown
    exposures: tuple[Exposure, ...]  # the sites of each layer
    taps: Mapping[ModelSite, Tap]  # embedding, final norm and perhaps logits
    cache_layout: SiteLayout | None = None  # layout of the cache over ranks, [B,K,P,D]; None if not declared


def find_model_exposure(
    module: nn.Module, *, num_layers: int, what: str, graph: ModelGraph | None = None
) -> ModelExposure:
    """Find the sites that a whole port shows; `what` names it in errors, `graph` tells the kinds of its layers."""
    declared = _read_declared(module, what=what) or {}
    known = {LAYERS, CACHE, *map(str, Site), *map(str, ModelSite)}
    if unknown := [name for name in declared if name not in known]:
        raise TargetError(
            f"{what}: sites names what mm2 does not know: {', '.join(unknown)}",
            expected=", ".join(sorted(known)),
            next_step=_SITES_STEP,
        )
    layers = _find_layers(module, declared.get(LAYERS), num_layers=num_layers, what=what)
    of_layers = {name: text for name, text in declared.items() if name in frozenset(Site)}
    taps = {site: Tap.parse(declared[str(site)]) for site in ModelSite if str(site) in declared}
    verify_taps(module, taps)
    present = {name for name, _ in module.named_modules()}
    for site, names in _USUAL.items():
        path = next((path for name in names for path in (f"model.{name}", name) if path in present), None)
        if path is not None:
            taps.setdefault(site, Tap(path=path))
    layout = declared.get(CACHE, "")
    return ModelExposure(
        layers=layers,
        exposures=tuple(
            find_exposure(
                layer,
                what=f"{what}, layer {index}",
                declared=of_layers or None,
                kind=None if graph is None else graph.layer(index),
            )
            for index, layer in enumerate(layers)
        ),
        taps=taps,
        cache_layout=parse_layout(layout.lstrip("@")) if layout else None,
    )


def _find_layers(
    module: nn.Module, declared: str | None, *, num_layers: int, what: str
) -> tuple[nn.Module, ...]:
    """Return the decoder layers: those at the declared path, or a list with as many modules; () if there is none."""
    lists = {path: found for path, found in module.named_modules() if isinstance(found, nn.ModuleList)}
    if declared is not None:
        found = dict(module.named_modules()).get(declared)
        children = () if found is None else tuple(found.children())
        if len(children) != num_layers:
            raise TargetError(
                f"{what}: sites['{LAYERS}'] = {declared!r} does not hold the model's layers",
                expected=f"{num_layers} submodules",
                found="no such submodule" if found is None else str(len(children)),
                next_step=_SITES_STEP,
            )
        return children
    fitting = [path for path, found in lists.items() if len(found) == num_layers]
    usual = [path for path in _LAYERS if path in fitting]
    chosen = (usual or sorted(fitting, key=lambda path: path.count(".")))[:1]
    return tuple(lists[chosen[0]].children()) if chosen else ()

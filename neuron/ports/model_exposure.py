"""The sites that a whole port shows: its layers, each with an `Exposure`, and the embedding and final norm.

A port names them in its attribute `sites`, or mm2 finds them by usual names. Sites of a layer are relative to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from minimax_tools.capture.taps import Tap, verify_taps
from minimax_tools.errors import TargetError
from minimax_tools.model.site_layouts import SiteLayout, parse_layout
from minimax_tools.model.sites import ModelSite, Site
from neuron.ports.exposure import Exposure, find_exposure
from neuron.ports.port_errors import port_errors

# Names in a whole port's `sites` that are no sites: its list of layers, and its cache's layout over ranks.
LAYERS, CACHE = "layers", "cache"

# Usual names, tried in this order.
_LAYERS = ("model.layers", "layers", "model.decoder.layers", "transformer.h", "decoder.layers")
_USUAL: Mapping[ModelSite, tuple[str, ...]] = {
    ModelSite.EMBEDDING: ("embed_tokens", "embedding", "embeddings", "tok_embeddings", "wte"),
    ModelSite.FINAL_NORM: ("norm", "final_norm", "final_layernorm", "ln_f"),
}
_SITES_STEP = "Correct the port's `sites`, or leave it out: then submodules with the usual names are found."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExposure:
    """The sites of a whole port's module."""

    layers: tuple[nn.Module, ...]  # the decoder layers, in order; empty if they are not shown
    exposures: tuple[Exposure, ...]  # the sites of each layer
    taps: Mapping[ModelSite, Tap]  # embedding, final norm and perhaps logits
    cache_layout: SiteLayout | None = None  # layout of the cache over ranks, [B,K,P,D]; None if not declared


def find_model_exposure(module: nn.Module, *, num_layers: int, what: str) -> ModelExposure:
    """Find the sites that a whole port shows; `what` names it in errors.

    Raises:
        TargetError: `sites` names an unknown site or a submodule that does not exist, or the wrong number of layers.
    """
    with port_errors(
        f"{what}: sites cannot be read", activity=f"reading sites of {what}", next_step=_SITES_STEP
    ):
        declared = getattr(module, "sites", None)
    declared = _read_declared(declared, what=what)
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
            find_exposure(layer, what=f"{what}, layer {index}", declared=of_layers or None)
            for index, layer in enumerate(layers)
        ),
        taps=taps,
        cache_layout=parse_layout(layout.lstrip("@")) if layout else None,
    )


def _read_declared(declared: object, *, what: str) -> dict[str, str]:
    known = {LAYERS, CACHE, *map(str, Site), *map(str, ModelSite)}
    if declared is None:
        return {}
    if not isinstance(declared, Mapping) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in declared.items()
    ):
        raise TargetError(
            f"{what}: sites is no mapping of names",
            expected="site names to paths like 'self_attn.q_proj'",
            found=repr(declared)[:80],
            next_step=_SITES_STEP,
        )
    unknown = [name for name in declared if name not in known]
    if unknown:
        raise TargetError(
            f"{what}: sites names what mm2 does not know: {', '.join(unknown)}",
            expected=", ".join(sorted(known)),
            next_step=_SITES_STEP,
        )
    return dict(declared)


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

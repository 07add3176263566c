"""Held weights: what the port was seen to hold of each layer's weights, judged; and router parts in another dtype.

Zeros and NaN are wrong. Anything else a port may undo in its forward: it is right if the site that reads these weights
is right, and a token of the golden reached them. If the golden does not tell, weights that lie otherwise than most of
their kind are wrong. A rounded gate or bias changes experts at near ties, and the bias shows in no tensor before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from compare.sides.sides import Sides
from minimax_tools.capture.manifest import HeldWeights, WeightFault
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.graph import LayerGraph, ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import WEIGHTS, Blame, RouterDtype, SiteResult, SiteStatus, WeightsResult

_MLP = ("gate_proj", "up_proj", "down_proj")
# They choose what attention sees in rows that are longer than any golden's.
_UNSEEN = frozenset(f"index_{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm"))
# The site that reads each kind of weight; the routed experts' sum may be another one than moe_delta.
_READERS: Mapping[str, Site] = MappingProxyType(
    {
        "input_layernorm": Site.INPUT_NORM,
        "q_proj": Site.Q_PROJ,
        "k_proj": Site.K_PROJ,
        "v_proj": Site.V_PROJ,
        "q_norm": Site.Q_NORM,
        "k_norm": Site.K_NORM,
        "o_proj": Site.ATTN_DELTA,
        "post_attention_layernorm": Site.POST_NORM,
        "gate": Site.ROUTER_LOGITS,
        "e_score_correction_bias": Site.ROUTER_EXPERTS,
        "w1": Site.MOE_DELTA,
        "w2": Site.MOE_DELTA,
        "w3": Site.MOE_DELTA,
        "q_proj.bias": Site.Q_PROJ,
        "k_proj.bias": Site.K_PROJ,
        "v_proj.bias": Site.V_PROJ,
        "o_proj.bias": Site.ATTN_DELTA,
        **dict.fromkeys(_UNSEEN, Site.ATTN_CONTEXT),
        **dict.fromkeys(_MLP, Site.MLP_DELTA),
        **{f"shared_experts.{matrix}": Site.SHARED_DELTA for matrix in _MLP},
    }
)


def _reader(kind: str, graph: LayerGraph) -> Site:
    """Return the site of a layer that reads a kind of weight."""
    site = _READERS[kind]
    return graph.routed_sum if site is Site.MOE_DELTA else site


_EXACT = "float32"
# Dtypes that hold every number of a BF16 model's router.
_NOT_ROUNDED = ("bfloat16", _EXACT)
# The effect of rounding a part of the router that the golden holds in float32.
_ROUNDED: Mapping[str, str] = MappingProxyType(
    {
        "correction_bias": "in BF16 it moves in steps of 0.03 from 4 on and of 0.06 from 8 on, where experts that "
        "compete are often closer",
        "router_gate": "its rounding moves every score, which changes experts at near ties",
    }
)


def find_router_dtypes(
    reference: CaptureSource, target: CaptureSource, sites: Iterable[SiteResult]
) -> tuple[RouterDtype, ...]:
    """Find the parts of the port's router in another dtype, by name; `sites` tell whether experts changed."""
    if reference.known_description is None:
        return ()  # another tool's dump does not say its dtypes
    expected = reference.description.provenance.dtypes
    # A router in the model's dtype may be held in a finer one.
    as_good = () if reference.graph.has_float32_router else _NOT_ROUNDED
    num_beyond_noise = sum(site.routing.num_unexplained for site in sites if site.routing is not None)
    return tuple(
        RouterDtype(
            name=name,
            reference=expected[name],
            target=found,
            consequence=_consequence(name, expected[name], num_beyond_noise),
        )
        for name, found in sorted(target.observed_dtypes.items())
        if name in expected and found not in (expected[name], *as_good)
    )


def _consequence(name: str, expected: str, num_beyond_noise: int) -> str:
    effect = _ROUNDED.get(name, "") if expected == _EXACT else ""
    flips = (
        f"{num_beyond_noise} token{'s' * (num_beyond_noise != 1)} of this run chose other experts beyond noise"
        if num_beyond_noise
        else "no token of this run chose other experts beyond noise, tokens of other runs may"
    )
    return f"{effect}; {flips}" if effect else flips


def judge_weights(sides: Sides, sites: Sequence[SiteResult]) -> tuple[WeightsResult, ...]:
    """Judge the weights of every layer that were compared when they were loaded; `sites` are all results."""
    layers = dict.fromkeys(site.layer for site in sites if site.layer is not None)
    return tuple(
        _judge_layer(
            sides, layer, held, {Site(site.site): site.status for site in sites if site.layer == layer}
        )
        for layer in layers
        if (held := sides.target.held_weights.get(layer)) is not None
    )


def blame_weights(blame: Sequence[Blame], weights: Sequence[WeightsResult]) -> tuple[Blame, ...]:
    """Return the blame with wrong weights as the reason of the sites that they explain, or else before the sites."""
    merged = list(blame)
    for layer in weights:
        if not layer.wrong:
            continue
        text = "; ".join(fault.text for fault in layer.wrong)
        places = [
            place
            for place, blamed in enumerate(merged)
            if blamed.layer == layer.layer and not set(layer.explains).isdisjoint(blamed.sites)
        ]
        for place in places:
            reason = f"its weights are wrong: {text}; {merged[place].reason}"
            merged[place] = replace(merged[place], reason=reason, is_of_weights=True)
        if not places:
            behind = (n for n, blamed in enumerate(merged) if (blamed.layer or 0) >= layer.layer)
            cause = Blame(layer=layer.layer, sites=(WEIGHTS,), reason=text, is_of_weights=True)
            merged.insert(next(behind, len(merged)), cause)
    return tuple(merged)


def note_weights(
    weights: Sequence[WeightsResult], blame: Sequence[Blame], graph: ModelGraph
) -> tuple[str, ...]:
    """Say which weights lie otherwise than others, and whether on purpose, and which were not compared, and why."""
    layers_of: dict[str, list[int]] = {}
    for layer in weights:
        for fault in layer.noted:
            blamed = _blamed_readers(fault, layer.layer, blame, graph.layer(layer.layer))
            doubt = f"{blamed} reads them, and is wrong" if blamed else "a port may do so on purpose"
            layers_of.setdefault(f"{fault.text}; {doubt}", []).append(layer.layer)
        if layer.not_compared:
            kinds = ", ".join(layer.not_compared)
            layers_of.setdefault(
                f"not compared with the checkpoint's numbers: {kinds}; {layer.reason}", []
            ).append(layer.layer)
    return tuple(f"weights of {word_layers(layers)}: {text}" for text, layers in layers_of.items())


def _blamed_readers(fault: WeightFault, layer: int, blame: Sequence[Blame], graph: LayerGraph) -> str:
    """Return which site of a layer is to blame and reads the weights of a fault; empty if none is."""
    blamed = {site for cause in blame if cause.layer == layer for site in cause.sites}
    return next((reader for kind in fault.kinds if (reader := str(_reader(kind, graph))) in blamed), "")


def _judge_layer(
    sides: Sides, layer: int, held: HeldWeights, statuses: Mapping[Site, SiteStatus]
) -> WeightsResult:
    reached = _reached_experts(sides, layer) if any(fault.experts for fault in held.faults) else frozenset()
    graph = sides.reference.graph.layer(layer)
    wrong = tuple(fault for fault in held.faults if _is_wrong(fault, statuses, reached, graph))
    explains = (
        str(_reader(kind, graph))
        for fault in wrong
        if not fault.experts or not reached.isdisjoint(fault.experts)
        for kind in fault.kinds
    )
    return WeightsResult(
        layer=layer,
        compared=held.compared,
        not_compared=held.not_compared,
        reason=held.reason,
        wrong=wrong,
        noted=tuple(fault for fault in held.faults if fault not in wrong),
        explains=tuple(dict.fromkeys(explains)),
        is_divided=held.is_divided,
    )


def _is_wrong(
    fault: WeightFault, statuses: Mapping[Site, SiteStatus], reached: frozenset[int], graph: LayerGraph
) -> bool:
    if fault.is_certain:
        return True
    is_seen = not fault.experts or not reached.isdisjoint(fault.experts)
    is_seen = is_seen and _UNSEEN.isdisjoint(fault.kinds)
    if is_seen and all(_is_right(_reader(kind, graph), statuses) for kind in fault.kinds):
        return False
    return fault.is_exception


def _is_right(reader: Site, statuses: Mapping[Site, SiteStatus]) -> bool:
    """Decide whether a site passes; if it was not compared, the next one that was."""
    behind = (
        status for site, status in statuses.items() if site.order >= reader.order and status.is_compared
    )
    return next(behind, SiteStatus.FAIL) is not SiteStatus.FAIL


def _reached_experts(sides: Sides, layer: int) -> frozenset[int]:
    """Return the experts that tokens of the golden chose; all of them if it does not tell."""
    chosen = sides.read_golden(layer, Site.ROUTER_EXPERTS)
    if chosen is None:
        made = sides.reference.known_description
        config = {} if made is None else made.provenance.model_config
        return frozenset(range(config.get(sides.reference.family.size_key("num_local_experts"), 0)))
    return frozenset(chosen.unique().int().tolist())

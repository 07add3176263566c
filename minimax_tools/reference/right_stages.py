"""Right stages: the right values of a layer's stages, in float32, from the port's own inputs of them.

B batch, S sequence, T real tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from minimax_tools.model.graph import LayerGraph
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import (
    Evaluation,
    LayerInputs,
    finite_padding,
    spread_mask,
    with_given,
)
from minimax_tools.reference.float32_stages import has_all_tokens


def readers_of(graph: LayerGraph, site: Site) -> tuple[Site, ...]:
    """Return the sites of a layer that are computed from a site, in execution order."""
    return tuple(reader for reader, inputs in graph.inputs.items() if site in inputs)


def sites_behind(graph: LayerGraph, sites: Iterable[Site]) -> frozenset[Site]:
    """Return all sites that follow from these, without those that do not follow from another of them."""
    behind: set[Site] = set()
    pending = list(sites)
    while pending:
        for reader in readers_of(graph, pending.pop()):
            if reader not in behind:
                behind.add(reader)
                pending.append(reader)
    return frozenset(behind)


def cut_behind(
    graph: LayerGraph, sites: Iterable[Site], *, replaceable: Collection[Site]
) -> tuple[Site, ...]:
    """Return the sites to replace for a mistake at `sites`, in execution order.

    A site that cannot be replaced gives its place to those that are computed from it. The layer's output ends all of
    them: it can always be replaced, and then nothing of the port follows.
    """
    cut: set[Site] = set()
    pending = list(sites)
    while pending:
        site = pending.pop()
        if site in replaceable or site is Site.OUTPUT:
            cut.add(site)
        else:
            pending += readers_of(graph, site)
    return tuple(sorted(cut, key=lambda site: site.order))


def waves(graph: LayerGraph, sites: Iterable[Site]) -> tuple[tuple[Site, ...], ...]:
    """Return the sites in groups, in execution order; none follows from another of its group."""
    groups: list[list[Site]] = []
    for site in sorted(sites, key=lambda site: site.order):
        if groups and site not in sites_behind(graph, groups[-1]):
            groups[-1].append(site)
        else:
            groups.append([site])
    return tuple(tuple(group) for group in groups)


def right_value(inputs: LayerInputs, site: Site, shown: Mapping[Site, torch.Tensor]) -> torch.Tensor:
    """Return the right values of a site, [B,S,…] in the port's dtype; padding keeps what the port gave.

    `shown` has the port's values, [B,S,…]: of the site itself, of the layer's input, and of any others. Those that
    do not follow from the site stand in for their stages; what is missing between them is computed.
    """
    port = shown[site]
    mask = inputs.attention_mask
    behind = sites_behind(inputs.graph, [site])
    given = {
        source: finite_padding(value, source, mask)
        for source, value in shown.items()
        if source is not site and source not in behind
    }
    tokens = inputs.judged_tokens
    with torch.no_grad():
        right = Evaluation(inputs, with_given(given), tokens=tokens)[site].to(port.dtype)
    if has_all_tokens(site):
        return torch.where(spread_mask(mask, site).bool(), right, port)
    flat = port.flatten(0, 1).clone()
    flat[tokens] = right
    filled: torch.Tensor = flat.unflatten(0, tuple(mask.shape))
    return filled

"""PassResult: the outcome of one pass of a whole port, whole or row by row.

B prompts, s columns of the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from minimax_tools.capture.passes import CachePair
from minimax_tools.model.sites import ModelSite, Site


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassResult:
    """The result of one pass, on the CPU."""

    logits: torch.Tensor  # [B,s,vocab] or [B,1,vocab]
    tokens: torch.Tensor | None  # tokens that the port chose, [B]; None if it chooses none
    # Sites by layer and outside the layers, as far as they are shown
    layers: Mapping[int, Mapping[Site, torch.Tensor]] = field(default_factory=dict)
    model: Mapping[ModelSite, torch.Tensor] = field(default_factory=dict)
    cache: Sequence[CachePair] | None = None  # by layer; None if it cannot be read
    layer_calls: tuple[int, ...] = ()  # layers in the order in which they were called


def join_rows(results: Sequence[PassResult]) -> PassResult:
    """Join the results of a prefill's rows; the last one's cache holds all of them."""
    first = results[0]
    tokens = [result.tokens for result in results if result.tokens is not None]
    calls = {result.layer_calls for result in results}
    return PassResult(
        logits=torch.cat([result.logits for result in results]),
        tokens=torch.cat(tokens) if len(tokens) == len(results) else None,
        layers={
            layer: {
                site: torch.cat([result.layers[layer][site] for result in results])
                for site in sites
                if all(site in result.layers.get(layer, {}) for result in results)
            }
            for layer, sites in first.layers.items()
        },
        model={
            site: torch.cat([result.model[site] for result in results])
            for site in first.model
            if all(site in result.model for result in results)
        },
        cache=results[-1].cache,
        # Rows that call other layers are shown whole: no order of layers is right then.
        layer_calls=calls.pop()
        if len(calls) == 1
        else tuple(chain.from_iterable(r.layer_calls for r in results)),
    )

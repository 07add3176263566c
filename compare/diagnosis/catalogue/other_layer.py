"""Mistakes of which layer's weights a layer computes with."""

from __future__ import annotations

import torch

from compare.diagnosis.evaluation import Change, GraphNode, LayerInputs, Stage
from compare.diagnosis.expert_pass import Recipe, read_matrix
from compare.diagnosis.layer_weights import Allocate, LayerWeights
from compare.diagnosis.mistake import Mistake, each
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS, EXPERT_MATRICES
from minimax_tools.reference.float32_stages import (
    NORMS,
    PROJECTIONS,
    choose_experts,
    normalise,
    router_scores,
)


def _of_layer(source_layer: int) -> Change:
    """Compute all stages with the weights of another layer."""

    def norm(source: Site, weight: str) -> Stage:
        return lambda layer: normalise(
            layer[source],
            layer.weights.of_layer(source_layer).kept_value(weight),
            layer.spec.rms_norm_eps,
        )

    def product(source: Site, weight: str) -> Stage:
        return lambda layer: layer[source] @ layer.weights.of_layer(source_layer).kept_value(weight).T

    stages: dict[GraphNode, Stage] = {
        **{site: norm(source, weight) for site, (source, weight) in NORMS.items()},
        **{site: product(source, weight) for site, (source, weight) in PROJECTIONS.items()},
        Site.ROUTER_EXPERTS: lambda layer: choose_experts(
            router_scores(layer) + layer.weights.of_layer(source_layer).kept_value(CORRECTION_BIAS),
            layer.spec.num_experts_per_tok,
        ),
    }

    def read(weights: LayerWeights, expert: int, matrix: str, allocate: Allocate) -> torch.Tensor:
        return read_matrix(weights.of_layer(source_layer), expert, matrix, allocate)

    recipe = Recipe(read=read, changed=EXPERT_MATRICES)
    return Change(stages=stages, recipe=recipe)


def _likely_layers(inputs: LayerInputs) -> list[int]:
    """List the layers whose weights are likeliest to be taken for this one's, as far as the checkpoint has them.

    They are the neighbours, the first, and those that change places when numbers are sorted as text: 0, 1, 10, 11, 2.
    """
    count, layer = inputs.spec.num_hidden_layers, inputs.weights.layer
    as_text = sorted(range(count), key=str)
    likely = (layer - 1, layer + 1, as_text[layer], as_text.index(layer), 0)
    return [
        other
        for other in dict.fromkeys(likely)
        if other != layer and 0 <= other < count and inputs.weights.has_layer(other)
    ]


OTHER_LAYER_MISTAKES = (
    Mistake(
        name="weights_of_another_layer",
        what="The layer computes with the weights of another layer.",
        look_at="how weights are assigned to layers: an index that is off, or layer names sorted as text",
        build=_of_layer,
        candidates=each("source_layer", _likely_layers),
    ),
)

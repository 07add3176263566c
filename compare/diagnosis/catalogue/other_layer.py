"""Mistakes of which layer's weights a layer computes with.

Mistakes of o_proj and of the residual stream.

`layer[site]` is of all tokens, [B,S,…], at the sites before `attn_context`; from there on of the T judged ones, [T,F].
`layer.rows(site)` is always of the judged ones.
"""

from __future__ import annotations

import torch

from compare.diagnosis.catalogue import repairs
from compare.diagnosis.evaluation import (
    Change,
    Evaluation,
    GraphNode,
    LayerInputs,
    Stage,
    replace_stage,
    scaled,
)
from compare.diagnosis.expert_pass import Allocate, LayerWeights, Recipe, read_matrix
from compare.diagnosis.mistake import Mistake, each, values_of
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS, EXPERT_MATRICES
from minimax_tools.reference.float32_stages import (
    NORMS,
    PROJECTIONS,
    choose_experts,
    normalise,
    router_scores,
)


def _post_norm_of_input(layer: Evaluation) -> torch.Tensor:
    weight = layer.weight(weight_names.POST_NORM)
    return normalise(layer.rows(Site.INPUT), weight, layer.spec.rms_norm_eps)


RESIDUAL_MISTAKES = (
    Mistake(
        name="o_proj_zero",
        what="Attention adds nothing: o_proj is zero, or never bound.",
        look_at="whether convert_state_dict binds o_proj.weight, and a quantised copy of it",
        build=lambda: replace_stage(Site.ATTN_DELTA, lambda layer: torch.zeros_like(layer.rows(Site.INPUT))),
    ),
    Mistake(
        name="attention_delta_scaled",
        what="What attention adds is off by a factor, such as the number of ranks that add it.",
        look_at="how often o_proj's output is reduced over ranks",
        build=lambda factor: scaled(Site.ATTN_DELTA, factor),
        candidates=values_of("factor", 2.0, 4.0, 8.0, 0.5, 0.25, 0.125, 16.0, 32.0, 64.0, 0.9),
        is_factor=True,
        fitted="factor",
        repair=repairs.OUTPUT_PROJECTION_DIVIDED,
    ),
    Mistake(
        name="attention_residual_missing",
        what="The layer's input is not added to what attention gives.",
        look_at="the first residual add",
        build=lambda: replace_stage(Site.ATTN_RESIDUAL, lambda layer: layer[Site.ATTN_DELTA]),
    ),
    Mistake(
        name="moe_residual_missing",
        what="What attention left is not added to what the experts give.",
        look_at="the second residual add",
        build=lambda: replace_stage(Site.OUTPUT, lambda layer: layer[Site.MOE_DELTA]),
    ),
    Mistake(
        name="residual_after_norm",
        what="The normed input is added to what attention gives, not the input.",
        look_at="where the residual is taken: before the norm",
        build=lambda: replace_stage(
            Site.ATTN_RESIDUAL, lambda layer: layer.rows(Site.INPUT_NORM) + layer[Site.ATTN_DELTA]
        ),
    ),
    Mistake(
        name="moe_residual_from_input",
        what="The layer's input is added to what the experts give: what attention added is lost.",
        look_at="which tensor the second residual add takes",
        build=lambda: replace_stage(
            Site.OUTPUT, lambda layer: layer.rows(Site.INPUT) + layer[Site.MOE_DELTA]
        ),
    ),
    Mistake(
        name="post_norm_of_input",
        what="The norm before the experts reads the layer's input.",
        look_at="what the post-attention norm is called with",
        build=lambda: replace_stage(Site.POST_NORM, _post_norm_of_input),
    ),
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

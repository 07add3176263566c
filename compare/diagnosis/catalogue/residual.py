"""Mistakes of o_proj and of the residual stream.

`layer[site]` is of all tokens, [B,S,…], at the sites before `attn_context`; from there on of the T judged ones, [T,F].
`layer.rows(site)` is always of the judged ones.
"""

from __future__ import annotations

import torch

from compare.diagnosis.catalogue import repairs
from compare.diagnosis.evaluation import Evaluation, replace_stage, scaled
from compare.diagnosis.mistake import Mistake, values_of
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import normalise


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

"""Smaller models of the same proportions: a layer whose conversion takes moments instead of minutes."""

from __future__ import annotations

import math

from minimax_tools.errors import CheckpointError
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expected_layer_shapes

# Of a layer that is traced as it is; MiniMax-M2's have 3.7 billion.
ENOUGH = 2_000_000
# More than ten: experts in the order of their names as text must differ from those in the order of their numbers.
_NUM_EXPERTS = 16
_LEAST_WIDTH = 64


def num_elements(spec: ModelSpec) -> int:
    """How many weights a layer has."""
    return sum(math.prod(shape) for shape in expected_layer_shapes(spec).values())


def smaller(spec: ModelSpec, *, num_ranks: int = 1) -> ModelSpec:
    """A model whose layers have about two million weights at most; `spec` itself where they have.

    Heads keep their width and their number per key head, the residual stream and the experts their proportion;
    layers keep their numbers. What ranks divide still divides.

    Args:
        spec: The model.
        num_ranks: Those that share a layer.
    """
    found = spec
    for experts in (spec.num_local_experts, _NUM_EXPERTS):
        found = _with(found, num_local_experts=min(experts, found.num_local_experts))
        if num_elements(found) <= ENOUGH:
            return found
    least_kv_heads = max(2, min(num_ranks, spec.num_key_value_heads))
    while found.num_key_value_heads > least_kv_heads and found.num_key_value_heads % 2 == 0:
        found = _with(
            found,
            num_attention_heads=found.num_attention_heads // 2,
            num_key_value_heads=found.num_key_value_heads // 2,
        )
    while num_elements(found) > ENOUGH and _can_halve(found, num_ranks):
        found = _with(
            found, hidden_size=found.hidden_size // 2, intermediate_size=found.intermediate_size // 2
        )
    return found


def _can_halve(spec: ModelSpec, num_ranks: int) -> bool:
    return all(
        width % (2 * unit) == 0 and width // 2 >= _LEAST_WIDTH
        for width, unit in ((spec.hidden_size, 8), (spec.intermediate_size, 8 * num_ranks))
    )


def _with(spec: ModelSpec, **changes: int) -> ModelSpec:
    experts = changes.get("num_local_experts", spec.num_local_experts)
    kept = {
        "head_dim": spec.head_dim,
        "num_experts_per_tok": min(spec.num_experts_per_tok, max(1, experts // 4)),
    }
    if experts == spec.num_local_experts:
        kept["num_experts_per_tok"] = spec.num_experts_per_tok
    try:
        return ModelSpec.from_config({**spec.raw, **kept, **changes})
    except CheckpointError:
        # Quantities that do not divide: the model as it is.
        return spec

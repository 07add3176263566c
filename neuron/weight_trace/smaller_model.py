"""Smaller model: a model of the same proportions whose layer is traced in seconds."""

from __future__ import annotations

import math

from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expected_layer_shapes

# A layer up to this size is traced as it is, in seconds; MiniMax-M2's layers have 3.7 billion elements.
MAX_ELEMENTS = 2_000_000
# More than ten: only from expert 10 on does the order of names as text differ from the order of numbers.
_NUM_EXPERTS = 16
_MIN_WIDTH = 64
# Halved widths stay multiples of 8, the unit in which ports and kernels divide them.
_WIDTH_UNIT = 8


def num_elements(spec: ModelSpec) -> int:
    """Count the weights of a layer."""
    return sum(math.prod(shape) for shape in expected_layer_shapes(spec).values())


def smaller_spec(spec: ModelSpec, *, num_ranks: int = 1) -> ModelSpec:
    """Return a model of the same proportions with at most `MAX_ELEMENTS` weights a layer, if halving gets that far.

    The head width, the query heads per kv head, the number of layers, and the ratio of hidden to intermediate size
    stay. If `num_ranks` divides the kv heads or the intermediate size, it still does. A model that is small enough is
    returned as it is.
    """
    if num_elements(spec) <= MAX_ELEMENTS:
        return spec
    # At least an expert for each rank.
    smaller = _with(spec, num_local_experts=min(max(_NUM_EXPERTS, num_ranks), spec.num_local_experts))
    if num_elements(smaller) <= MAX_ELEMENTS:
        return smaller
    while _can_halve_heads(smaller, num_ranks):
        smaller = _with(
            smaller,
            num_attention_heads=smaller.num_attention_heads // 2,
            num_key_value_heads=smaller.num_key_value_heads // 2,
        )
    while num_elements(smaller) > MAX_ELEMENTS and _can_halve_widths(smaller, num_ranks):
        smaller = _with(
            smaller, hidden_size=smaller.hidden_size // 2, intermediate_size=smaller.intermediate_size // 2
        )
    return smaller


def _can_halve_heads(spec: ModelSpec, num_ranks: int) -> bool:
    num_heads = spec.num_key_value_heads
    # With a single kv head, heads in another order could not be seen.
    if num_heads % 2 or num_heads // 2 < max(2, min(num_ranks, num_heads)):
        return False
    return num_heads % num_ranks != 0 or num_heads // 2 % num_ranks == 0


def _can_halve_widths(spec: ModelSpec, num_ranks: int) -> bool:
    return all(
        width % (2 * unit) == 0 and width // 2 >= _MIN_WIDTH
        for width, unit in (
            (spec.hidden_size, _WIDTH_UNIT),
            (spec.intermediate_size, _WIDTH_UNIT * num_ranks),
        )
    )


def _with(spec: ModelSpec, **changes: int) -> ModelSpec:
    """Return the model with changed quantities of config.json.

    With fewer experts, a token takes at most a quarter of them, so that the router's choice still matters.
    """
    experts = changes.get("num_local_experts", spec.num_local_experts)
    if experts != spec.num_local_experts:
        changes["num_experts_per_tok"] = min(spec.num_experts_per_tok, max(1, experts // 4))
    return ModelSpec.from_config({**spec.raw, "head_dim": spec.head_dim, **changes})

"""Names of the variants that widen a noise floor, and their number; `variants` computes them."""

from __future__ import annotations

# Number of variants that a golden computes by default, and the most that it computes: each costs one more copy.
DEFAULT_NUM_VARIANTS = 2
MOST_VARIANTS = 8
NEAREST = "nearest"


def variant_names(number: int) -> tuple[str, ...]:
    """Return the names of the first `number` variants: `nearest`, `random_1`, `random_2` and so on."""
    return (NEAREST, *(f"random_{draw}" for draw in range(1, number)))[:number]

"""Variants: other right ways to compute a decoder layer in BF16, which round in other places than the golden.

A port that rounds there is as right as the golden, and its error is larger or smaller for it. Where the golden measured
what such ways cost, a port is held, at each site and token, against the one that strays furthest from the float32 twin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to compute a layer; its experts are added up in BF16, one after the other, as transformers' eager ones are.

    Args:
        name: What a capture calls it.
        attn_implementation: transformers' attention implementation.
        num_parts: Into how many parts of the width that they sum over the products with o_proj and with the experts'
            down matrices are cut; each is rounded before they are added, as ranks of tensor parallelism do.
    """

    name: str
    attn_implementation: str
    num_parts: int = 1

    def is_golden_of(self, *, attn_implementation: str, experts_implementation: str) -> bool:
        """Whether a golden of these implementations computes just so."""
        own = (self.attn_implementation, "eager", self.num_parts)
        return own == (attn_implementation, experts_implementation, 1)


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        variant.name: variant
        for variant in (
            # Attention's scores are rounded before the softmax, the experts' sum after every expert.
            Variant(name="eager", attn_implementation="eager"),
            # What two ranks of tensor parallelism give.
            Variant(name="halves", attn_implementation="sdpa", num_parts=2),
        )
    }
)


def variants_beside(*, attn_implementation: str, experts_implementation: str) -> tuple[str, ...]:
    """Names of the variants that a golden of these implementations has beside itself."""
    return tuple(
        name
        for name, variant in VARIANTS.items()
        if not variant.is_golden_of(
            attn_implementation=attn_implementation, experts_implementation=experts_implementation
        )
    )

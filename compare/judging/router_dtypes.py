"""Router dtypes: parts of the router that a port holds in another dtype than the golden, and what that does.

A rounded gate or correction bias changes experts at near ties. Before the choice, the bias shows in no tensor, and the
gate in `router_logits` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from minimax_tools.capture.source import CaptureSource
from minimax_tools.results.results import RouterDtype, SiteResult

_EXACT = "float32"
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
    num_beyond_noise = sum(site.routing.num_unexplained for site in sites if site.routing is not None)
    return tuple(
        RouterDtype(
            name=name,
            reference=expected[name],
            target=found,
            consequence=_consequence(name, expected[name], num_beyond_noise),
        )
        for name, found in sorted(target.observed_dtypes.items())
        if name in expected and found != expected[name]
    )


def _consequence(name: str, expected: str, num_beyond_noise: int) -> str:
    effect = _ROUNDED.get(name, "") if expected == _EXACT else ""
    flips = (
        f"{num_beyond_noise} token{'s' * (num_beyond_noise != 1)} of this run chose other experts beyond noise"
        if num_beyond_noise
        else "no token of this run chose other experts beyond noise, tokens of other runs may"
    )
    return f"{effect}; {flips}" if effect else flips

"""LimitContext: facts beside a site's figures that its limits depend on."""

from __future__ import annotations

from dataclasses import dataclass

from minimax_tools.capture.source import CaptureSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitContext:
    """Facts of both sides that limits depend on."""

    backend: str | None  # backend that the port ran on; None if its capture does not say
    is_float32: bool  # whether the golden computed in float32, which has no BF16 noise
    share: float  # share of false alarms allowed to each judged figure
    hides_flips: bool = False  # whether flips (tokens sent to other experts) cannot be told from other tokens


def computes_in_float32(reference: CaptureSource) -> bool:
    """Decide whether a golden computed in float32; a capture that does not say counts as BF16."""
    description = reference.known_description
    return description is not None and description.provenance.dtypes.get("weights") == "float32"


def backend_of(target: CaptureSource) -> str | None:
    """Return the backend that a port ran on; None if its capture does not say."""
    description = target.known_description
    return None if description is None else description.provenance.backend

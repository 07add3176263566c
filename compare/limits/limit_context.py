"""LimitContext: facts beside a site's figures that its limits depend on."""

from __future__ import annotations

from dataclasses import dataclass

from minimax_tools.capture.source import CaptureSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitContext:
    """Facts of both sides that limits depend on.

    Args:
        backend: Where the port ran; None where nothing tells.
        is_float32: Whether the golden computed in float32, which has no BF16 noise.
        share: Of false alarms that each judged figure may have.
        hides_flips: Whether tokens whose experts differ cannot be told from the others.
    """

    backend: str | None
    is_float32: bool
    share: float
    hides_flips: bool = False


def computes_in_float32(reference: CaptureSource) -> bool:
    """Decide whether a golden computed in float32; a layout that does not say is taken for BF16."""
    description = reference.known_description
    return description is not None and description.provenance.dtypes.get("weights") == "float32"


def backend_of(target: CaptureSource) -> str | None:
    """Return the backend that a port ran on; None where its layout does not say."""
    description = target.known_description
    return None if description is None else description.provenance.backend

"""Coverage: compared layers that a pass proves right, and those that it does not.

A layer is proved by its end: the experts' sum or the output shows every mistake in it. Two kinds of layers may pass and
be wrong: those whose end was judged on no token, and those that inherit errors where no checkpoint is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from compare.sides.sides import Sides
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.inputs import format_positions
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import SiteResult, SiteStatus

# What leaves the experts; either shows their mistakes.
_ENDS = (Site.MOE_DELTA, Site.OUTPUT)


def is_proved(results: Sequence[SiteResult]) -> bool:
    """Return whether the end of a layer was judged, on at least one token.

    Args:
        results: Of the sites that its run computes, in execution order; none of a layer that has not run.
    """
    if not results:
        # Of an older layout's range of layers only the end is kept, and judged.
        return True
    by_site = {Site(one.site): one for one in results}
    ends = [by_site[site] for site in _ENDS if site in by_site] or list(results[-1:])
    return any(one.status.is_compared for one in ends)


def word_tokens(reference: CaptureSource, target: CaptureSource) -> str:
    """Word the tokens that both sides computed, such as `81 at positions 0-47`; empty where no side is mm2's own."""
    for source in (reference, target):
        if source.known_description is not None:
            inputs = source.read_inputs()
            return f"{int(inputs.attention_mask.sum())} at {format_positions(inputs)}"
    return ""


def unproved_notes(layers: Sequence[int], *, sides: Sides) -> tuple[str, ...]:
    """Note the layers that no verdict stands on, and what would settle them."""
    if not layers:
        return ()
    names = ", ".join(str(layer) for layer in layers)
    remedy = (
        "--model DIR computes what a right layer makes of the port's own input"
        if sides.weights is None
        else "capture router_experts, router_logits or post_norm of the port, or run its layers one by one"
    )
    return (
        f"nothing proves layer{'s' * (len(layers) > 1)} {names}: a layer that inherits errors, or whose "
        f"end was judged on no token, may be wrong and pass. To settle it: {remedy}",
    )


SiteKind = TypeVar("SiteKind", Site, ModelSite)


def leave_undecided(
    results: Mapping[SiteKind, SiteResult], target: CaptureSource
) -> dict[SiteKind, SiteResult]:
    """Leave failures undecided in a part whose input was not captured, but for NaN and other shapes.

    A result that stays as it was is the same object.
    """
    if not target.may_omit_inputs:
        return dict(results)
    return {
        site: _undecided(result) if _may_be_handed_on(result) else result for site, result in results.items()
    }


def undecided_notes(num_undecided: int) -> tuple[str, ...]:
    """Note sites that differ, perhaps through an input that was not captured."""
    if not num_undecided:
        return ()
    return (
        f"{num_undecided} sites differ behind an input that was not captured: the difference may come from there. "
        "Capture the layers' inputs, or say in a map where they lie",
    )


def _may_be_handed_on(result: SiteResult) -> bool:
    if result.status is not SiteStatus.FAIL:
        return False
    if result.routing is not None:
        return True
    return result.metrics is not None and not result.metrics.num_nonfinite_target


def _undecided(result: SiteResult) -> SiteResult:
    reason = f"{result.reason}; its inputs are not held"
    return replace(result, status=SiteStatus.NOT_JUDGED, reason=reason)

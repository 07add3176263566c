"""Undecided: what differs in a part of another tool's dump that does not tell what that part was fed.

Such a dump is of a run of the whole model: each layer is handed the errors of those before. Where its input was not
kept, a port that is right differs from the golden as one that is wrong does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from minimax_tools.capture.source import CaptureSource
from minimax_tools.dumps.capture import ForeignCapture
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import SiteResult, SiteStatus

SiteKind = TypeVar("SiteKind", Site, ModelSite)


def leave_undecided(
    results: Mapping[SiteKind, SiteResult], target: CaptureSource
) -> dict[SiteKind, SiteResult]:
    """The results of a part that was fed nobody knows what: failures are not judged, but for NaN and other shapes.

    What stays as it was is the same object.
    """
    if not isinstance(target, ForeignCapture):
        return dict(results)
    return {
        site: _undecided(result) if _may_be_handed_on(result) else result for site, result in results.items()
    }


def undecided_notes(num_undecided: int) -> tuple[str, ...]:
    """That something differs of which it cannot be told who is to blame, and what would tell."""
    if not num_undecided:
        return ()
    return (
        f"{num_undecided} sites differ behind an input that the device run does not hold: it may come from there. "
        "Capture what layers are fed, or say in a map where it lies",
    )


def _may_be_handed_on(result: SiteResult) -> bool:
    if result.status is not SiteStatus.FAIL:
        return False
    if result.routing is not None:
        return True
    return result.metrics is not None and not result.metrics.num_nonfinite_target


def _undecided(result: SiteResult) -> SiteResult:
    reason = f"{result.reason}; what it is computed from is not held"
    return replace(result, status=SiteStatus.NOT_JUDGED, reason=reason)

"""Coverage: whether a layer's results prove anything.

- A layer that passes is proved right by its end: the experts' sum, or the output, shows its mistakes.
- A failure in another tool's dump is undecided if the dump lacks the layer's input: the input may be what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import SiteResult, SiteStatus

# Sites behind the experts; either shows the layer's mistakes. One in the last residual add does not show in
# `moe_delta`; it shows in the next layer's input in a dump.
_ENDS = (Site.MOE_DELTA, Site.OUTPUT)


def is_proved(results: Sequence[SiteResult]) -> bool:
    """Decide whether the end of a layer was judged; `results` are those of its sites, in execution order."""
    if not results:
        # A range of layers in an older layout (`LegacyCapture`): its first layer holds an input alone, so nothing of it
        # can be judged. The output of its last layer is.
        return True
    by_site = {Site(result.site): result for result in results}
    # A run of a component, such as attention, has neither of `_ENDS`: its last site is its end.
    ends = [by_site[site] for site in _ENDS if site in by_site] or [results[-1]]
    return any(end.status.is_compared for end in ends)


SiteKind = TypeVar("SiteKind", Site, ModelSite)


def leave_undecided(
    results: Mapping[SiteKind, SiteResult], target: CaptureSource
) -> dict[SiteKind, SiteResult]:
    """Leave failures undecided, if the capture's format may omit inputs.

    `results` are those of a part (a layer, or what is outside the layers) whose input was not captured: the caller
    checks that. NaN, infinity, wrong shapes and missing sites still fail. A result that does not change is returned as
    the same object.
    """
    if not target.may_omit_inputs:
        return dict(results)
    return {
        site: _undecided(result) if _may_be_inherited(result) else result for site, result in results.items()
    }


def _may_be_inherited(result: SiteResult) -> bool:
    """Decide whether a wrong input can cause a failure: values or experts were compared, and no NaN was found."""
    if result.status is not SiteStatus.FAIL:
        return False
    if result.routing is not None:
        return True
    metrics = result.judged_metrics
    return metrics is not None and not metrics.num_nonfinite_target


def _undecided(result: SiteResult) -> SiteResult:
    reason = f"{result.reason}; its inputs are not held"
    return replace(result, status=SiteStatus.NOT_JUDGED, reason=reason)

"""Handed on: whether a site's error can be what the sites that it is computed from carry.

A residual stream hides an error beside its own noise, and what is computed from it may show the error again. A stage
that is right hands an error on as it hands noise on: in units of its own noise the error does not grow. Errors of
different origins add in squares.
"""

from __future__ import annotations

from collections.abc import Iterable

from minimax_tools.results.results import NearestLimit, SiteResult


def is_handed_on(result: SiteResult, inputs: Iterable[SiteResult]) -> bool:
    """Whether a failing site breaks its limit by no more than its inputs' errors account for.

    Args:
        result: The failing site's; what fails without a figure, such as NaN or a wrong shape, nobody handed on.
        inputs: Those of the sites that it is computed from, which pass.
    """
    broken = result.nearest
    if broken is None or not broken.excess > 1.0:
        return False
    carried = max((_carried(one, broken) for one in inputs), default=0.0)
    return broken.value**2 <= broken.limit**2 + carried


def _carried(upstream: SiteResult, broken: NearestLimit) -> float:
    """The square of what a site hands on, in the unit of the figure that is broken behind it."""
    if upstream.noise is not None:
        value: float | None = getattr(upstream.noise, broken.figure, None)
        return 0.0 if value is None else max(value**2 - 1.0, 0.0)
    if upstream.relative is not None and upstream.nearest is not None:
        # No floor tells how much of it is noise: all of it may be an error.
        return (broken.limit * upstream.nearest.excess) ** 2
    return 0.0

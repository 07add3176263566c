"""Curve of detection against false alarms, as all limits of noise are scaled by a factor.

A case is one layer of a right or a mistaken port. It keeps its excess, the largest ratio of a figure to its limit, and
fails if that exceeds the factor: no port runs again. Flips of experts beyond noise, other shapes and NaN have an
infinite excess. Blame plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from figures import Figure

from faults.cases import Case
from faults.tally import clean_cases

FACTORS = (0.5, 0.63, 0.8, 0.9, 1.0, 1.12, 1.25, 1.6, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """Detection and false alarms if all limits are multiplied by a factor."""

    factor: float
    num_mistakes: int  # mistakes above the floor
    num_detected: int  # mistakes whose layer fails
    num_visible: int  # those of them that also change the output by more than its floor
    num_visible_detected: int  # visible mistakes whose layer fails by its output alone
    num_clean: int  # right layers
    num_alarms: int  # right layers that fail, with all sites or by the output alone


def trace_operating_curve(cases: Sequence[Case]) -> tuple[OperatingPoint, ...]:
    """Return the point of each of `FACTORS`, in their order."""
    above = [case for case in cases if case.is_above_floor]
    visible = [case for case in above if case.is_distinguishable]
    clean = list(clean_cases(cases))
    return tuple(
        OperatingPoint(
            factor=factor,
            num_mistakes=len(above),
            num_detected=sum(case.largest_excess > factor for case in above),
            num_visible=len(visible),
            num_visible_detected=sum(case.black_box_excess > factor for case in visible),
            num_clean=len(clean),
            num_alarms=sum(max(case.largest_excess, case.black_box_excess) > factor for case in clean),
        )
        for factor in FACTORS
    )


def give_curve_figures(points: Sequence[OperatingPoint]) -> Iterator[Figure]:
    """Yield the curve as figures, up to three for each factor."""
    for point in points:
        name = f"curve_{point.factor:g}"
        if point.num_mistakes:
            yield Figure.plain(f"{name}_detected_%", 100 * point.num_detected / point.num_mistakes)
        if point.num_visible:
            share = 100 * point.num_visible_detected / point.num_visible
            yield Figure.plain(f"{name}_black_box_detected_%", share)
        if point.num_clean:
            yield Figure.plain(f"{name}_false_alarms", point.num_alarms)


def render_curve(cases: Sequence[Case]) -> str:
    """Render the curve as a table, and the distances of right layers and mistakes to the limits."""
    lines = ["limits ×   detected        by output alone   false alarms"]
    for point in trace_operating_curve(cases):
        cells = (
            _share(point.num_detected, point.num_mistakes),
            _share(point.num_visible_detected, point.num_visible),
            f"{point.num_alarms} of {point.num_clean}",
        )
        lines.append(f"{point.factor:8.2f}   {cells[0]:15} {cells[1]:17} {cells[2]}")
    return "\n".join((*lines, *_margins(cases)))


def _margins(cases: Sequence[Case]) -> Iterator[str]:
    """Yield a sentence on the largest excess of right layers, and one on the smallest of mistakes."""
    clean = [max(case.largest_excess, case.black_box_excess) for case in clean_cases(cases)]
    finite = sorted(excess for excess in clean if math.isfinite(excess))
    if finite:
        yield (
            f"Right layers reach {finite[-1]:.3g} of a limit at most, one in a hundred reaches "
            f"{finite[-1 - len(finite) // 100]:.3g}: below these factors they fail."
            + (f" {len(clean) - len(finite)} fail at any factor." if len(finite) < len(clean) else "")
        )
    above = sorted(case.largest_excess for case in cases if case.is_above_floor)
    if above:
        yield (
            f"Mistakes above the floor reach {above[0]:.3g} of a limit at least, all but one in a hundred "
            f"{above[len(above) // 100]:.3g}: beyond these factors they pass."
        )


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} {100 * part / whole:.1f} %" if whole else "–"

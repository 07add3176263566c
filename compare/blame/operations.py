"""Operations: two blamed sites that one operation computes are one cause, if they are wrong alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from compare.blame.blame import badness
from minimax_tools.model.sites import SHARED_OPERATIONS
from minimax_tools.results.results import Blame, ModelFinding, Range, SiteResult, WrongRegion

# Largest ratio of two errors that are about as large, in noise floors. Of planted mistakes of one operation, rotary
# ones have 0.78 to 1.14, and norms over the wrong width up to 3.8.
_ABOUT_AS_LARGE = 1.5
# Fields of `WrongRegion` that must be equal, must be about the same, and only be named by both sites or by neither.
_OF_TOKENS, _RANGES, _OF_HEADS = (
    ("rows", "every", "experts", "is_decoded"),
    ("tokens", "positions", "dims"),
    ("heads", "channels"),
)
# Least share of the numbers of two ranges that both hold, if they are about the same.
_SAME_RANGE = 0.8


def join_alike(blame: tuple[Blame, ...], grounds: Iterable[SiteResult]) -> tuple[Blame, ...]:
    """Mark the blame of two sites of one operation that are wrong alike, in the layers where both are blamed."""
    results = {(result.layer, result.site): result for result in grounds}
    for operation, sites in SHARED_OPERATIONS.items():
        pairs = {
            layer: (results[layer, sites[0]], results[layer, sites[1]])
            for layer in _shared_layers(blame, sites)
            if (layer, sites[0]) in results and (layer, sites[1]) in results
        }
        worst = max(pairs.values(), key=lambda pair: max(map(badness, pair)), default=None)
        if worst is not None and _are_alike(*worst):
            blame = join_operation(blame, operation, pairs)
    return blame


def join_operation(
    blame: tuple[Blame, ...], operation: str, layers: Collection[int | None]
) -> tuple[Blame, ...]:
    """Mark the blame of an operation's two sites as one cause, in those of some layers where both are blamed alone."""
    sites = SHARED_OPERATIONS[operation]
    joined = _shared_layers(blame, sites) & set(layers)
    return tuple(
        replace(blamed, operation=operation)
        if blamed.layer in joined and blamed.sites in ((sites[0],), (sites[1],))
        else blamed
        for blamed in blame
    )


def join_findings(findings: Sequence[ModelFinding], blame: Iterable[Blame]) -> tuple[ModelFinding, ...]:
    """Mark the findings of two sites that `blame` joins, where one pass shows both."""
    operations = {(blamed.layer, blamed.sites): blamed.operation for blamed in blame}
    joined = [
        operations.get((finding.layer, finding.sites), "") if finding.is_of_sites else ""
        for finding in findings
    ]
    places = [
        (finding.number, finding.layer, operation)
        for finding, operation in zip(findings, joined, strict=True)
    ]
    counts = Counter(places)
    return tuple(
        replace(finding, operation=operation if counts[place] > 1 else "")
        for finding, operation, place in zip(findings, joined, places, strict=True)
    )


def _shared_layers(blame: Iterable[Blame], sites: Iterable[str]) -> set[int | None]:
    """Return the layers in which each of some sites is blamed, with no other suspect beside it."""
    layers = [{blamed.layer for blamed in blame if blamed.sites == (site,)} for site in sites]
    return set.intersection(*layers)


def _are_alike(first: SiteResult, second: SiteResult) -> bool:
    size, other = _size(first), _size(second)
    if size is None or other is None:
        # Failures without a figure, such as NaN, are alike.
        return size is other
    return size <= _ABOUT_AS_LARGE * other <= _ABOUT_AS_LARGE**2 * size and _agree(
        first.regions, second.regions
    )


def _size(result: SiteResult) -> float | None:
    """Return a site's error in noise floors, or relative to the golden; None without a figure."""
    if result.nearest is None:
        return None
    if result.noise is not None:
        return result.noise.whole
    return None if result.relative is None else result.relative.value


def _agree(first: Sequence[WrongRegion], second: Sequence[WrongRegion]) -> bool:
    """Decide whether the regions of two sites say the same, but for the numbers of heads, of which keys have fewer."""
    pattern, other = _pattern(first), _pattern(second)
    return pattern.keys() == other.keys() and all(
        _is_same_range(pattern[kind], other[kind]) if kind in _RANGES else pattern[kind] == other[kind]
        for kind in pattern.keys() - _OF_HEADS
    )


def _pattern(regions: Iterable[WrongRegion]) -> dict[str, Any]:
    named = (
        (kind, getattr(region, kind)) for region in regions for kind in (*_OF_TOKENS, *_RANGES, *_OF_HEADS)
    )
    return {kind: value for kind, value in named if value not in ((), None)}


def _is_same_range(first: tuple[Range, ...], second: tuple[Range, ...]) -> bool:
    held, others = (
        {number for low, high in ranges for number in range(low, high + 1)} for ranges in (first, second)
    )
    return len(held & others) >= _SAME_RANGE * len(held | others)

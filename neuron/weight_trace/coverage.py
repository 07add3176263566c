"""Coverage: how often each element of a layer lands in a port: what is missing, and what is there several times."""

from __future__ import annotations

from collections.abc import Sequence as Values

import torch

from neuron.weight_trace.finding import Severity, WeightFinding, WeightMistake
from neuron.weight_trace.layout import PlaceLayout
from neuron.weight_trace.origin import Origin
from neuron.weight_trace.place_part import AT_ONCE
from neuron.weight_trace.sources import Sources, SourceTensors, kinds_of, word_sources


def find_by_count(by_rank: Values[Values[PlaceLayout]], sources: Sources) -> list[WeightFinding]:
    """What lands nowhere, and what lands several times.

    Args:
        by_rank: The layouts of each rank; of several each may hold a copy.
        sources: The layer's tensors.
    """
    layouts = [layout for of_rank in by_rank for layout in of_rank]
    counts = _count(layouts, sources)
    missing = _find_missing(counts, layouts, sources)
    # Ranks may hold copies of what they share.
    duplicated = _find_duplicated(counts, missing, layouts, sources) if len(by_rank) == 1 else []
    return [*missing, *duplicated]


def _count(layouts: Values[PlaceLayout], sources: Sources) -> torch.Tensor:
    """How often each element lands, int16: a count, and no index, is what is kept of each."""
    counts = torch.zeros(sources.size, dtype=torch.int16)
    for layout in layouts:
        for part in layout.origin.numbers.reshape(-1).split(AT_ONCE):
            landed = part[part >= 0]
            counts.index_add_(0, landed, torch.ones(len(landed), dtype=torch.int16))
    return counts


def _find_missing(
    counts: torch.Tensor, layouts: Values[PlaceLayout], sources: Sources
) -> list[WeightFinding]:
    computed = {kind for layout in layouts for kind in layout.origin.mixed_kinds}
    lost = {source: int((_part(counts, source) == 0).sum()) for source in sources.all}
    whole = [source for source, count in lost.items() if count == source.size and source.kind not in computed]
    found = []
    if whole:
        constants = _constants_like(whole, layouts)
        found.append(
            WeightFinding(
                mistake=WeightMistake.MISSING,
                weight=Severity.WRONG,
                tensors=kinds_of(whole),
                places=tuple(origin.name for origin in constants),
                text=f"missing: {word_sources(whole)} {'lands' if len(whole) == 1 else 'land'} nowhere"
                + "".join(f"; {_word_constant(origin)}" for origin in constants),
            )
        )
    for source, count in lost.items():
        if 0 < count < source.size and source.kind not in computed:
            found.append(
                WeightFinding(
                    mistake=WeightMistake.MISSING,
                    weight=Severity.WRONG,
                    tensors=(source.kind,),
                    places=(),
                    text=f"missing: {count} of {source.size} elements of {word_sources([source])} land nowhere",
                )
            )
    return found


def _constants_like(missing: Values[SourceTensors], layouts: Values[PlaceLayout]) -> list[Origin]:
    """Places that could be meant for what is missing, and hold what the port's constructor put there."""
    shapes = {source.shape for source in missing}
    return [
        layout.origin
        for layout in layouts
        if layout.origin.num_constant == layout.origin.numbers.numel() and layout.origin.shape in shapes
    ]


def _word_constant(origin: Origin) -> str:
    held = "what its constructor gave it" if origin.constant is None else f"{origin.constant:g} everywhere"
    return f"{origin} was never bound: it holds {held}"


def _find_duplicated(
    counts: torch.Tensor,
    missing: Values[WeightFinding],
    layouts: Values[PlaceLayout],
    sources: Sources,
) -> list[WeightFinding]:
    several = [source for source in sources.all if bool((_part(counts, source) > 1).any())]
    if not several:
        return []
    lacking = {kind for finding in missing for kind in finding.tensors}
    found = []
    for is_wrong in (True, False):
        group = [source for source in several if (source.kind in lacking) == is_wrong]
        if group:
            most = max(int(_part(counts, source).max()) for source in group)
            found.append(
                WeightFinding(
                    mistake=WeightMistake.DUPLICATED,
                    weight=Severity.WRONG if is_wrong else Severity.NOTE,
                    tensors=kinds_of(group),
                    places=_places_of(group, layouts),
                    text=f"duplicated: {word_sources(group)} {'lands' if len(group) == 1 else 'land'} "
                    f"{_times(most)}" + (", where others of the kind land nowhere" if is_wrong else ""),
                )
            )
    return found


def _places_of(sources: Values[SourceTensors], layouts: Values[PlaceLayout]) -> tuple[str, ...]:
    names = {source.name for source in sources}
    return tuple(
        layout.origin.name
        for layout in layouts
        if any(piece.source is not None and piece.source.name in names for piece in layout.pieces)
    )


def _part(counts: torch.Tensor, source: SourceTensors) -> torch.Tensor:
    return counts[source.start : source.start + source.size]


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"

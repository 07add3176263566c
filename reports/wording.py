"""Wording: places, figures and orders in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from minimax_tools.errors import format_count
from minimax_tools.model.graph import LayerGraph, ModelGraph
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import Untested

# Beginning of the last line of a pass.
UNTESTED = "Not tested: "
# A longer run of sites is named by its first and its last.
_MOST_NAMED_SITES = 4
# Kinds of layers: with experts, with shared ones beside them, and dense.
_KINDS = (
    LayerGraph(ModelGraph()),
    LayerGraph(ModelGraph(shared_width=1)),
    LayerGraph(ModelGraph(), is_dense=True),
)
# Figures from here on have no decimals; those beyond the other two have an exponent.
_WHOLE_FROM = 1e3
_EXPONENT_FROM, _EXPONENT_BELOW = 1e6, 1e-3
# More exchanged pairs than this have another pattern, or none.
_MOST_PAIRS = 3
# Numbers that are told of an order without a pattern, from the first that is not in its place.
_MOST_SHOWN = 4


def word_order(numbers: Sequence[int], *, noun: str) -> str:
    """Return the order of numbers as a clause, such as `experts 5 and 6 are exchanged`; `noun` is their plural.

    | numbers | text, for `experts` |
    |---|---|
    | 0 1 2 4 3 5 | experts 3 and 4 are exchanged |
    | 5 4 3 2 1 0 | experts lie in reverse order |
    | 3 4 5 0 1 2 | experts lie with their halves exchanged |
    | 2 3 4 5 0 1 | experts lie rolled by 2: the first is 2 |
    | 0 1 10 11 2 3 | experts lie in the order of their numbers as text: 0, 1, 10, … |
    | 0 4 1 3 5 2 | experts lie in another order, from place 1 on: 4, 1, 3, 5, … |
    """
    ascending = sorted(numbers)
    moved = [place for place, number in enumerate(numbers) if number != ascending[place]]
    if not moved:
        return f"{noun} lie in order"
    pairs = _exchanged_pairs(numbers, ascending, moved)
    if 0 < len(pairs) <= _MOST_PAIRS:
        return f"{noun} {', '.join(f'{first} and {second}' for first, second in pairs)} are exchanged"
    if list(numbers) == ascending[::-1]:
        return f"{noun} lie in reverse order"
    start = ascending.index(numbers[0])
    if list(numbers) == ascending[start:] + ascending[:start]:
        if 2 * start == len(numbers):
            return f"{noun} lie with their halves exchanged"
        return f"{noun} lie rolled by {start}: the first is {numbers[0]}"
    if list(numbers) == sorted(numbers, key=str):
        shown = ", ".join(map(str, numbers[:_MOST_SHOWN]))
        return f"{noun} lie in the order of their numbers as text: {shown}, …"
    first = moved[0]
    told = ", ".join(map(str, numbers[first : first + _MOST_SHOWN]))
    more = ", …" if len(numbers) > first + _MOST_SHOWN else ""
    return f"{noun} lie in another order, from place {first} on: {told}{more}"


def _exchanged_pairs(
    numbers: Sequence[int], ascending: Sequence[int], moved: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the pairs of numbers that lie in each other's places; [] if other numbers are moved too."""
    place_of = {number: place for place, number in enumerate(numbers)}
    if len(place_of) < len(numbers):
        return []
    pairs = []
    for place in moved:
        other = place_of[ascending[place]]
        if numbers[place] != ascending[other]:
            return []
        if place < other:
            pairs.append((ascending[place], ascending[other]))
    return pairs


def word_figure(value: float | None) -> str:
    """Return a figure to three digits, such as `14.2`, `0.0313`, `1.23e-05`, `nan`; `-` for None."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    if size >= _EXPONENT_FROM or size < _EXPONENT_BELOW:
        return f"{value:.2e}"
    return f"{value:.0f}" if size >= _WHOLE_FROM else f"{value:#.3g}".rstrip(".")


def word_ordinal(number: int) -> str:
    """Return a number with its ending, such as `32nd`."""
    is_teen = number % 100 in (11, 12, 13)
    ending = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def word_fraction(value: float | None, *, decimals: int) -> str:
    """Return a figure, such as a cosine, to so many decimals; a large one as `word_figure`, `-` for None."""
    if value is None:
        return "-"
    return f"{value:.{decimals}f}" if abs(value) < _WHOLE_FROM else word_figure(value)


def word_shape(shape: Sequence[int]) -> str:
    """Return a tensor's shape, such as `1x96x3072`; `scalar` for no dimension."""
    return "x".join(str(size) for size in shape) or "scalar"


def word_index(index: Sequence[int]) -> str:
    """Return a position in a tensor, such as `0,17,2044`."""
    return ",".join(str(position) for position in index)


def word_layer(layer: int | None) -> str:
    """Return `layer 5`, or `model` for None."""
    return "model" if layer is None else f"layer {layer}"


def word_port(port: str) -> str:
    """Name a run's port in words; mm2's own layer is told apart from a port under test."""
    return "builtin: mm2's own layer, no port of yours (--target names one)" if port == "builtin" else port


def word_place(layer: int | None, sites: Iterable[str]) -> str:
    """Return a place to look at, such as `layer 5, moe_delta`."""
    return ", ".join([word_layer(layer), *sites])


def word_sites(sites: Sequence[str]) -> tuple[str, ...]:
    """Return the names of sites; a long run of a layer's consecutive ones as `input_norm to attn_delta`."""
    if len(sites) > _MOST_NAMED_SITES and any(_is_run(sites, kind) for kind in _KINDS):
        return (f"{sites[0]} to {sites[-1]}",)
    return tuple(sites)


def _is_run(sites: Sequence[str], kind: LayerGraph) -> bool:
    names = [str(site) for site in kind.sites]
    start = names.index(sites[0]) if sites[0] in names else len(names)
    return names[start : start + len(sites)] == list(sites)


def word_variants(variants: Sequence[str]) -> str:
    """Return variants in words, such as `2 variants (eager, halves)`."""
    return f"{format_count(len(variants), 'variant')} ({', '.join(variants)})"


def word_sites_by_layer(places: Iterable[tuple[int | None, str]]) -> tuple[str, ...]:
    """Return lines such as `layers 0-7: q_rope, k_rope`; layers with the same sites share a line."""
    sites_of: dict[int | None, list[str]] = {}
    for layer, site in places:
        sites_of.setdefault(layer, []).append(site)
    layers_with: dict[tuple[str, ...], list[int | None]] = {}
    for layer, sites in sites_of.items():
        layers_with.setdefault(tuple(sites), []).append(layer)
    return tuple(f"{word_layers(layers)}: {', '.join(sites)}" for sites, layers in layers_with.items())


def word_untested(untested: Iterable[Untested]) -> str:
    """Return the line of what was not tested, with what tests it; empty if nothing was left out."""
    details: dict[str, list[str]] = {}
    for found in untested:
        details.setdefault(found.by, []).append(found.detail)
    alone = details.pop("", [])  # what nothing tests
    parts = (*(f"{', '.join(of_command)} ({by})" for by, of_command in details.items()), *alone)
    return f"{UNTESTED}{'; '.join(parts)}." if parts else ""

"""HeatMap: every site's figures, a row for each layer and a column for each site, as plain values for the page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from minimax_tools.errors import format_count
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus
from reports.views import anchor_of, measured
from reports.wording import word_figure, word_fraction, word_index, word_layer

_FROM_ONE = "log_from_one"


class Figure(NamedTuple):
    """A figure that the map can show, and how it becomes a shade.

    The shade grows from 0 at `best` to 1 at `worst`, both on the figure's own `scale`: `log` of the value, or of its
    distance from 1 (`log_from_one`).
    """

    name: str
    title: str
    meaning: str
    scale: str
    best: float
    worst: float

    @property
    def is_classic(self) -> bool:
        """True for the figures of the five classic limits."""
        return self.name in _CLASSIC


_CLASSIC = ("cosine_similarity", "pearson_correlation", "max_abs_diff", "mean_abs_diff", "close_fraction")
FIGURES = (
    Figure("rho", "ρ", "the port's error over the noise floor; 1 is as good as the golden", "log", 1, 100),
    Figure("relative_l2", "relative L2", "‖port − golden‖ ∕ ‖golden‖", "log", 1e-3, 1.0),
    Figure("norm_ratio", "norm ratio", "‖port‖ ∕ ‖golden‖; cosine cannot see scale", _FROM_ONE, 1e-4, 0.3),
    Figure("cosine_similarity", "cosine", "cosine of the angle between both sides", _FROM_ONE, 1e-6, 0.1),
    Figure("pearson_correlation", "Pearson", "correlation of both sides", _FROM_ONE, 1e-6, 0.1),
    Figure("max_abs_diff", "max |diff|", "largest |port − golden|", "log", 1e-3, 1.0),
    Figure("mean_abs_diff", "mean |diff|", "mean |port − golden|", "log", 1e-5, 0.1),
    Figure("close_fraction", "close", "share of elements within atol + rtol·|golden|", _FROM_ONE, 1e-4, 1),
)
# Marks beside the shade, which grey print and the colour-blind need.
MARKS = {
    SiteStatus.FAIL: "✕",
    SiteStatus.WARN: "!",
    SiteStatus.NOT_EXPOSED: "–",
    SiteStatus.NOT_CAPTURED: "–",
    SiteStatus.NOT_JUDGED: "?",
}
_DECIMALS = {"cosine_similarity": 5, "pearson_correlation": 5, "close_fraction": 4, "norm_ratio": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Cell of the map: one site of one layer."""

    layer: int | None  # None outside the layers
    site: str
    status: str
    mark: str  # of the status; empty for a pass
    is_blamed: bool
    shades: tuple[float | None, ...]  # one for each of `FIGURES`; None if it was not measured
    words: tuple[str, ...]  # the same figures in words; of a choice of experts its flips
    told: tuple[str, ...]  # the same with their names, such as `ρ 14.2`
    reason: str
    facts: tuple[tuple[str, str], ...]  # everything else that is known of the site, by its name

    @property
    def place(self) -> str:
        """The cell in words, such as `layer 5, moe_delta`."""
        return f"{word_layer(self.layer)}, {self.site}"

    @property
    def anchor(self) -> str:
        """The cell as part of an id in the page."""
        return anchor_of(self.layer, self.site)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMapRow:
    """The cells of one layer, one for each column; None where the run declares no such site."""

    title: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A table of cells; its rows are layers, its columns sites in execution order."""

    sites: tuple[str, ...]
    rows: tuple[HeatMapRow, ...]


def cells_of(drawn: HeatMap) -> list[Cell]:
    """Return the cells of a map, in the order in which the page numbers them."""
    return [cell for row in drawn.rows for cell in row.cells if cell is not None]


def draw_layers(comparison: Comparison) -> HeatMap:
    """Return the map of the sites in the layers."""
    return _draw(comparison, comparison.layers, order=[str(site) for site in Site])


def draw_outside(comparison: Comparison) -> HeatMap:
    """Return the map of the sites outside the layers, with no row if there are none."""
    layers: Iterable[int | None] = (None,) if comparison.of_layer(None) else ()
    return _draw(comparison, layers, order=[str(site) for site in ModelSite])


def _draw(comparison: Comparison, layers: Iterable[int | None], *, order: list[str]) -> HeatMap:
    layers = tuple(layers)
    results = {(site.layer, site.site): site for site in comparison.sites if site.layer in layers}
    blamed = {(blame.layer, site) for blame in comparison.blame for site in blame.sites}
    held = {site for _, site in results}
    # A site that this mm2 does not know stands last.
    sites = tuple(sorted(held, key=lambda site: (order.index(site) if site in order else len(order), site)))
    return HeatMap(
        sites=sites,
        rows=tuple(
            HeatMapRow(
                title="model" if layer is None else str(layer),
                cells=tuple(
                    _cell(results[layer, site], is_blamed=(layer, site) in blamed)
                    if (layer, site) in results
                    else None
                    for site in sites
                ),
            )
            for layer in layers
        ),
    )


def shade(figure: Figure, value: float | None) -> float | None:
    """Return the shade of a value, from 0 (best) to 1 (worst); NaN is the worst, None has none."""
    if value is None:
        return None
    if not math.isfinite(value):
        return 1.0
    distance = abs(value - 1.0) if figure.scale == _FROM_ONE else abs(value)
    if distance <= figure.best:
        return 0.0
    share = math.log(distance / figure.best) / math.log(figure.worst / figure.best)
    return round(min(share, 1.0), 3)


def _cell(result: SiteResult, *, is_blamed: bool) -> Cell:
    values = [measured(result, figure.name) for figure in FIGURES]
    shades = tuple(shade(figure, value) for figure, value in zip(FIGURES, values, strict=True))
    words = tuple(_word(figure.name, value) for figure, value in zip(FIGURES, values, strict=True))
    told = tuple(
        f"{figure.title} {word or 'not measured'}" for figure, word in zip(FIGURES, words, strict=True)
    )
    if result.routing is not None:
        # Numbers of experts have no figures: flips are shown in their place.
        shades = (float(result.routing.num_unexplained > 0),) * len(FIGURES)
        words = told = (format_count(result.routing.num_flipped, "flip"),) * len(FIGURES)
    return Cell(
        layer=result.layer,
        site=result.site,
        status=str(result.status),
        mark=MARKS.get(result.status, ""),
        is_blamed=is_blamed,
        shades=shades,
        words=words,
        told=told,
        reason=result.reason,
        facts=tuple(_facts(result)),
    )


def _word(name: str, value: float | None) -> str:
    if value is None:
        return ""
    decimals = _DECIMALS.get(name)
    return word_figure(value) if decimals is None else word_fraction(value, decimals=decimals)


def _facts(result: SiteResult) -> Iterable[tuple[str, str]]:
    """Yield what is known of a site beside `FIGURES`."""
    noise, routing = result.noise, result.routing
    if noise is not None:
        yield "ρ, ordinary channels", word_figure(noise.ordinary)
        if noise.massive is not None:
            yield "ρ, massive channels", word_figure(noise.massive)
        yield (
            "ρ of the tokens: median, p99",
            f"{word_figure(noise.token_median)}, {word_figure(noise.token_p99)}",
        )
        yield "ρ of the worst token", f"{word_figure(noise.token_worst)} at {_word_token(noise.worst_token)}"
        if noise.interval is not None:
            yield "95 % interval of ρ", " to ".join(word_figure(end) for end in noise.interval)
        if noise.channel_worst is not None:
            yield "ρ of the worst channel", f"{word_figure(noise.channel_worst)} in {noise.worst_channel}"
        averages = {
            "ρ of the tokens' scale": noise.token_gain,
            "ρ of the channels' scale": noise.channel_gain,
            "ρ of the channels' mean": noise.channel_offset,
        }
        yield from ((name, word_figure(value)) for name, value in averages.items() if value is not None)
        yield "noise floor, relative", word_figure(noise.floor)
        if noise.is_estimated:
            yield "ρ is estimated", "the golden keeps no float32 twin of the site"
    if result.nearest is not None:
        nearest = result.nearest
        yield (
            "nearest limit",
            f"{nearest.figure} {word_figure(nearest.value)}, limit {word_figure(nearest.limit)}",
        )
    metrics = result.metrics
    if metrics is not None and routing is None:
        yield "worst element at", word_index(metrics.worst_index)
        in_port, in_golden = metrics.num_nonfinite_target, metrics.num_nonfinite_reference
        if in_port or in_golden:
            counts = f"{in_port} of the port, {in_golden} of the golden"
            yield "NaN or Inf", f"{counts}, of {metrics.num_elements} elements"
    if routing is not None:
        yield "tokens with other experts", f"{routing.num_flipped} of {routing.num_tokens}"
        yield "explained by noise", str(routing.num_explained)
    known = {
        "tokens judged": result.num_judged or "",
        "tokens set aside": result.num_set_aside or "",
        "tokens judged by replay": result.num_replayed or "",
        "classic limits": "; ".join(result.classic_failures),
        "where": "; ".join(result.where),
    }
    yield from ((name, str(value)) for name, value in known.items() if value)


def _word_token(token: tuple[int, int]) -> str:
    row, position = token
    return f"row {row}, token {position}"

"""Metric columns: the five classic figures of a layer's output, as columns of the overview."""

from __future__ import annotations

from collections.abc import Sequence

from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import SiteResult
from reports.canvas import Column
from reports.wording import word_figure, word_fraction

METRIC_COLUMNS = tuple(
    Column(title=title)
    for title in ("max\n|diff|", "mean\n|diff|", "close\n%", "output\ncosine", "output\nPearson")
)
METRIC_LEGEND = (
    "|diff|, close, cosine and Pearson: of the layer's output, and of the model's logits. close: elements within "
    "atol + rtol * |golden|."
)
_DECIMALS = 6
_PERCENT_DECIMALS = 2
_SHOWN = (Site.OUTPUT, ModelSite.LOGITS)


def metric_cells(sites: Sequence[SiteResult]) -> tuple[str, ...]:
    """Return the five figures of a layer's output or the model's logits; `-` where the two sides were not measured."""
    metrics = next((site.metrics for site in sites if site.site in _SHOWN and site.metrics), None)
    if metrics is None or metrics.num_nonfinite_target == metrics.num_elements:
        return ("-",) * len(METRIC_COLUMNS)
    return (
        word_figure(metrics.max_abs_diff),
        word_figure(metrics.mean_abs_diff),
        word_fraction(100.0 * metrics.close_fraction, decimals=_PERCENT_DECIMALS),
        word_fraction(metrics.cosine_similarity, decimals=_DECIMALS),
        word_fraction(metrics.pearson_correlation, decimals=_DECIMALS),
    )

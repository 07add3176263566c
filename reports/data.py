"""Data: a comparison as JSON and as a CSV table.

JSON values of reports: plain JSON that every parser reads, without NaN and Infinity.

Reports are not read back; what mm2 reads again is written by `minimax_tools.json_codec`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from minimax_tools.metrics.pair_metrics import PairMetrics
from minimax_tools.results.results import (
    BlameGroup,
    Comparison,
    NearestLimit,
    NoiseRatio,
    SiteResult,
    SiteStatus,
)
from reports.views import measured
from reports.wording import word_index


def to_json(value: object) -> Any:
    """Convert a value to what `json.dumps` takes.

    Dataclasses become objects, tuples lists, enums their values, infinities `"inf"` or `"-inf"`, NaN null. Any other
    value is returned as it is.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else f"{value:g}"
    return value


# Sites that the summary names for each measure.
_NUM_WORST = 5
# Measures by which the summary ranks sites: True if a higher value is worse, False if a lower one is.
_HIGHER_IS_WORSE: Mapping[str, bool] = {
    "max_abs_diff": True,
    "mean_abs_diff": True,
    "close_fraction": False,
    "cosine_similarity": False,
    "pearson_correlation": False,
    "relative_l2": True,
    "rho": True,
}
# Columns of the table, and the fields of a site's `noise` that they hold: `rho` its field `whole`, `rho_massive` its
# field `massive`. An interval is two figures, which JSON alone has.
_NOISE_COLUMNS: Mapping[str, str] = {
    "rho" if field.name == "whole" else f"rho_{field.name}": field.name
    for field in fields(NoiseRatio)
    if field.name != "interval"
}
_ROUTING_COLUMNS = (
    "num_tokens",
    "num_flipped",
    "num_explained",
    "num_unexplained",
    "widest_unexplained_margin",
)
_NEAREST_COLUMNS: Mapping[str, str] = {f"nearest_{field.name}": field.name for field in fields(NearestLimit)}
_COUNTS = ("num_judged", "num_set_aside", "num_replayed")
_METRIC_COLUMNS = tuple(field.name for field in fields(PairMetrics))
# The same figures on the port's own input, in a chained run.
_OWN_INPUT_COLUMNS: Mapping[str, str] = {f"own_input_{name}": name for name in _METRIC_COLUMNS}


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """Return the whole comparison as JSON: the verdict, the blame, and every figure of every site."""
    return {**_conclusion(comparison), "sites": [_site_record(site) for site in comparison.sites]}


def summary_record(comparison: Comparison) -> dict[str, Any]:
    """Return the conclusion as JSON, with the worst sites by each measure."""
    return {
        **_conclusion(comparison),
        "coverage": _coverage(comparison),
        "limits": _limits(comparison),
        "cause": [_cause(comparison, group) for group in comparison.blame_groups],
        "statuses": {
            str(status): sum(site.status is status for site in comparison.sites) for status in SiteStatus
        },
        "worst": {name: _worst(comparison, name) for name in _HIGHER_IS_WORSE},
    }


def comparison_table(comparison: Comparison) -> str:
    """Return the comparison as CSV: one row for each site, layers ascending, sites outside the layers last.

    All comparisons have the same columns; unknown values are empty.
    """
    table = io.StringIO()
    columns = _table_row(SiteResult(layer=None, site="", status=SiteStatus.PASS))
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    for site in sorted(comparison.sites, key=lambda site: (site.layer is None, site.layer or 0)):
        writer.writerow(_table_row(site))
    return table.getvalue()


def _conclusion(comparison: Comparison) -> dict[str, Any]:
    return {
        "verdict": comparison.verdict.value,
        "compared": comparison.compared,
        "tokens": comparison.tokens,
        "of": comparison.of,
        "blame": to_json(comparison.blame),
        "blame_groups": to_json(comparison.blame_groups),
        "curve": to_json(comparison.curve),
        "criteria": comparison.criteria,
        "reference": comparison.reference,
        "target": comparison.target,
        "port": comparison.port,
        "notes": list(comparison.notes),
        "untested": to_json(comparison.untested),
        "router_dtypes": to_json(comparison.router_dtypes),
        "weights": to_json(comparison.weights),
        "generated": to_json(comparison.generated),
        **({"passes": to_json(comparison.pass_logits)} if comparison.pass_logits else {}),
        **({"findings": to_json(comparison.findings)} if comparison.findings else {}),
        **({} if comparison.chunks is None else {"chunks": to_json(comparison.chunks)}),
    }


def _coverage(comparison: Comparison) -> dict[str, Any]:
    """Return what was compared, and by status the sites that were not, with their layers."""
    left_out: dict[tuple[str, str], list[int | None]] = {}
    for site in comparison.sites:
        if not site.status.is_compared:
            left_out.setdefault((site.status.value, site.site), []).append(site.layer)
    return {
        "compared": comparison.compared,
        "of": comparison.of,
        "layers": list(comparison.layers),
        "not_compared": [
            {"status": status, "site": site, "layers": layers} for (status, site), layers in left_out.items()
        ],
    }


def _limits(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the sites furthest beyond their limits or nearest to them, worst first."""
    limited = [(site, site.nearest) for site in comparison.sites if site.nearest is not None]
    limited.sort(key=lambda pair: pair[1].excess, reverse=True)
    return [
        {
            "layer": site.layer,
            "site": site.site,
            "status": site.status.value,
            "figure": nearest.figure,
            "value": to_json(nearest.value),
            "limit": to_json(nearest.limit),
        }
        for site, nearest in limited[:_NUM_WORST]
    ]


def _cause(comparison: Comparison, group: BlameGroup) -> dict[str, Any]:
    """Return the sites to blame in some layers, how bad they are, and where the wrong values lie."""
    blamed = [site for site in comparison.of_layer(group.worst_layer) if site.site in group.sites]
    is_failing = any(site.status is SiteStatus.FAIL for site in blamed)
    return {
        "layers": list(group.layers),
        "sites": list(group.sites),
        "operation": group.operation,
        "severity": (SiteStatus.FAIL if is_failing or not blamed else SiteStatus.WARN).value,
        "reason": group.reason,
        "where": [*group.where],
        "regions": to_json(group.regions),
    }


def _site_record(site: SiteResult) -> dict[str, Any]:
    record: dict[str, Any] = to_json(site)
    for name, choices in (("routing", site.routing), ("logits", site.logits)):
        if choices is not None:
            record[name]["num_unexplained"] = choices.num_unexplained
    return record


def _worst(comparison: Comparison, name: str) -> list[dict[str, Any]]:
    """Return the worst sites by one measure, worst first; NaN is worst of all, unknown values are left out."""
    figures = [(site, value) for site in comparison.sites if (value := measured(site, name)) is not None]
    sign = 1 if _HIGHER_IS_WORSE[name] else -1
    figures.sort(key=lambda pair: math.inf if math.isnan(pair[1]) else sign * pair[1], reverse=True)
    return [
        {"layer": site.layer, "site": site.site, "status": site.status.value, "value": to_json(value)}
        for site, value in figures[:_NUM_WORST]
    ]


def _table_row(site: SiteResult) -> dict[str, str]:
    values: dict[str, object] = {
        "layer": site.layer,
        "site": site.site,
        "status": site.status.value,
        "reason": site.reason,
        **{column: getattr(site.noise, name, None) for column, name in _NOISE_COLUMNS.items()},
        **{name: getattr(site.metrics, name, None) for name in _METRIC_COLUMNS},
        **{name: getattr(site.routing, name, None) for name in _ROUTING_COLUMNS},
        **{column: getattr(site.nearest, name, None) for column, name in _NEAREST_COLUMNS.items()},
        **{name: getattr(site, name) if site.status.is_compared else None for name in _COUNTS},
        "classic_failures": "; ".join(site.classic_failures),
        **{
            column: getattr(site.own_input_metrics, name, None) for column, name in _OWN_INPUT_COLUMNS.items()
        },
    }
    return {column: _cell(value) for column, value in values.items()}


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return word_index(value) if isinstance(value, tuple) else str(value)

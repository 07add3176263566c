from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Comparison, Verdict
from reports.data import comparison_record, comparison_table, summary_record, to_json

EXAMPLES = ("passing", "failing", "warning", "nonfinite", "unexposed", "classic", "chained")
MEASURES = (
    *("max_abs_diff", "mean_abs_diff", "close_fraction", "cosine_similarity", "pearson_correlation"),
    *("relative_l2", "rho"),
)


def site_record(record: dict[str, Any], layer: int | None, site: str) -> dict[str, Any]:
    (found,) = [one for one in record["sites"] if (one["layer"], one["site"]) == (layer, site)]
    return dict(found)


def table_rows(comparison: Comparison) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(comparison_table(comparison))))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1.5, 1.5),
        (math.nan, None),
        (-math.inf, "-inf"),
        (True, True),
        ({5: [(math.inf, Verdict.FAIL)]}, {"5": [["inf", "fail"]]}),
    ],
)
def test_only_what_json_cannot_hold_changes(value: object, found: object) -> None:
    assert to_json(value) == found


def test_record_has_the_keys_that_scripts_read(failing: Comparison) -> None:
    record = comparison_record(failing)
    assert (record["verdict"], record["compared"], record["of"]) == ("fail", 136, 136)
    assert [(blame["layer"], blame["sites"]) for blame in record["blame"]] == [(5, ["moe_delta"])]
    site = site_record(record, 5, "moe_delta")
    assert (site["status"], site["noise"]["whole"]) == ("fail", 14.2)
    assert (site["noise"]["worst_token"], site["metrics"]["worst_index"]) == ([0, 17], [0, 17, 2044])
    assert len(record["sites"]) == 136


def test_missing_sites_are_there_and_not_compared(unexposed: Comparison) -> None:
    record = comparison_record(unexposed)
    assert (record["compared"], record["of"]) == (116, 136)
    assert site_record(record, 3, "q_rope")["status"] == "not exposed"
    assert site_record(record, 3, "q_rope")["metrics"] is None
    statuses = {"pass": 116, "warn": 0, "fail": 0, "not exposed": 16, "not captured": 4, "not judged": 0}
    assert summary_record(unexposed)["statuses"] == statuses


def test_routing_counts_what_noise_does_not_explain(warning: Comparison) -> None:
    routing = site_record(comparison_record(warning), 3, "router_experts")["routing"]
    assert (routing["num_flipped"], routing["num_unexplained"]) == (2, 0)


def test_summary_begins_with_the_largest_differences_and_the_lowest_likenesses(failing: Comparison) -> None:
    worst = summary_record(failing)["worst"]
    assert tuple(worst) == MEASURES
    assert all(len(sites) == 5 for sites in worst.values())
    for measure in MEASURES:
        values = [site["value"] for site in worst[measure]]
        is_likeness = measure in ("close_fraction", "cosine_similarity", "pearson_correlation")
        assert values == sorted(values, reverse=not is_likeness)
        assert {"moe_delta", "output"} <= {site["site"] for site in worst[measure] if site["layer"] == 5}
    assert worst["rho"][0] == {"layer": 5, "site": "moe_delta", "status": "fail", "value": 14.2}


def test_nan_is_the_worst_of_all_and_what_json_and_tables_can_hold(nonfinite: Comparison) -> None:
    for record in (comparison_record(nonfinite), summary_record(nonfinite)):
        assert json.loads(json.dumps(record, allow_nan=False)) == record
    worst = summary_record(nonfinite)["worst"]
    first, second, *_ = [(site["site"], site["value"]) for site in worst["rho"]]
    assert (first, second) == (("attn_context", None), ("attn_delta", "inf"))
    # An undefined cosine has no place.
    assert "attn_context" not in [site["site"] for site in worst["cosine_similarity"]]
    rows = {(row["layer"], row["site"]): row for row in table_rows(nonfinite)}
    assert math.isnan(float(rows["2", "attn_context"]["rho"]))
    assert math.isinf(float(rows["2", "attn_delta"]["rho"]))
    assert rows["2", "attn_context"]["cosine_similarity"] == ""


def test_without_a_noise_floor_no_rho_is_invented(classic: Comparison) -> None:
    worst = summary_record(classic)["worst"]
    assert worst["rho"] == []
    assert worst["relative_l2"]


def test_table_has_a_row_for_each_site_in_natural_layer_order_and_the_model_last(
    chained: Comparison, passing: Comparison
) -> None:
    rows = table_rows(chained)
    assert [int(row["layer"]) for row in rows[::17]] == list(range(30))
    assert [row["site"] for row in rows[:17]] == [
        str(site) for site in ModelGraph().sites if site is not Site.INPUT
    ]
    shuffled = replace(passing, sites=(*passing.sites[-3:], *passing.sites[:-3]))
    last = [(row["layer"], row["site"]) for row in table_rows(shuffled)[-3:]]
    assert last == [("", "embedding"), ("", "final_norm"), ("", "logits")]
    assert table_rows(shuffled) == table_rows(passing)


def test_columns_are_the_same_for_every_comparison(request: pytest.FixtureRequest) -> None:
    headers = {comparison_table(request.getfixturevalue(name)).partition("\n")[0] for name in EXAMPLES}
    assert len(headers) == 1
    assert headers.pop().startswith("layer,site,status,reason,rho,")


def test_figures_keep_all_their_digits(failing: Comparison) -> None:
    (row,) = [row for row in table_rows(failing) if (row["layer"], row["site"]) == ("5", "moe_delta")]
    (site,) = [site for site in failing.of_layer(5) if site.site == "moe_delta"]
    assert site.metrics is not None
    assert site.noise is not None
    assert float(row["rho_ordinary"]) == site.noise.ordinary
    assert float(row["norm_ratio"]) == site.metrics.norm_ratio
    assert (row["worst_index"], row["rho_is_estimated"], row["num_flipped"]) == ("0,17,2044", "false", "")

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from minimax_tools.results.results import BlameGroup, Comparison
from reports.data import to_json
from reports.page.evidence import Evidence, Report
from reports.page.html import Chart, draw_charts
from reports.views import blame_rows

Plan = Callable[..., Report]
EXAMPLES = ("passing", "failing", "warning", "nonfinite", "unexposed", "classic", "chained")


def charts_of(report: Report) -> Mapping[str, tuple[Chart, ...]]:
    return draw_charts(report.comparison, report.evidence)


def test_blame_of_several_layers_leads_to_the_worst(failing: Comparison) -> None:
    group = BlameGroup(
        layers=(3, 5), sites=("moe_delta",), worst_layer=5, reason="rho 14.2", where=("token 1",)
    )
    (row,) = blame_rows(replace(failing, blame_groups=(group,)))
    assert row.place == "layers 3, 5, moe_delta"
    assert row.reason == "worst in layer 5: rho 14.2"
    assert (row.anchors, row.where) == (("5-moe_delta",), ("token 1",))


def test_curve_begins_at_the_blamed_site(plan: Plan, failing: Comparison) -> None:
    (curve,) = charts_of(plan(failing))["curves"]
    assert curve.spec["params"][0]["value"] == "moe_delta"
    errors = {
        row["layer"]: row["error"] for row in curve.spec["data"]["values"] if row["site"] == "moe_delta"
    }
    assert errors[5] == pytest.approx(14.2 * 0.004, rel=1e-3)


def test_chained_run_has_a_curve_along_the_chain(plan: Plan, chained: Comparison) -> None:
    chain = {chart.name: chart for chart in charts_of(plan(chained))["curves"]}["chain"]
    assert "begin at layer 20" in chain.reading
    # The first layer inherits nothing, which a logarithmic axis cannot show.
    assert [row["inherited"] for row in chain.spec["data"]["values"]][:3] == [None, 0.001, 0.002]


def test_page_without_evidence_has_no_empty_charts(classic: Comparison) -> None:
    charts = [chart for section in draw_charts(classic, Evidence()).values() for chart in section]
    assert {chart.name for chart in charts} <= {"curve", "chain", "flips"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_vega_lite_understands_every_chart(plan: Plan, name: str, request: pytest.FixtureRequest) -> None:
    vega = pytest.importorskip(
        "vl_convert", reason="vl-convert-python is not installed: it is in the extra report"
    )
    sections = charts_of(plan(request.getfixturevalue(name))).values()
    charts = [chart for section in sections for chart in section]
    assert len({chart.name for chart in charts}) == len(charts)
    for chart in charts:
        spec = to_json(chart.spec)
        assert vega.vegalite_to_vega(spec, vl_version="6.1")["marks"]
        assert chart.reading.endswith(".")

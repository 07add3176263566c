from __future__ import annotations

import math

import pytest

from minimax_tools.results.results import Comparison
from reports.page.heat_map import FIGURES, Cell, HeatMap, draw_layers, draw_outside, shade

BY_NAME = {figure.name: figure for figure in FIGURES}


def cell(drawn: HeatMap, row: int, site: str) -> Cell:
    found = drawn.rows[row].cells[drawn.sites.index(site)]
    assert found is not None
    return found


def test_map_has_a_row_for_each_layer_and_a_column_for_each_site(
    passing: Comparison, failing: Comparison
) -> None:
    drawn = draw_layers(passing)
    assert [row.title for row in drawn.rows] == [str(layer) for layer in range(8)]
    assert len(drawn.sites) == 17
    assert drawn.sites[:2] == ("input_norm", "q_proj")
    assert draw_outside(passing).sites == ("embedding", "final_norm", "logits")
    # A run without sites outside the layers has no row for them.
    assert draw_outside(failing).rows == ()


def test_blamed_site_is_marked_and_its_consequence_is_not(failing: Comparison) -> None:
    drawn = draw_layers(failing)
    blamed, behind = cell(drawn, 5, "moe_delta"), cell(drawn, 5, "output")
    assert (blamed.is_blamed, blamed.mark) == (True, "✕")
    assert (behind.is_blamed, behind.mark) == (False, "✕")
    assert blamed.words[0] == "14.2"
    assert blamed.told[0] == "ρ 14.2"


def test_cells_tell_flips_what_the_port_hides_and_facts_that_the_map_does_not(
    warning: Comparison, unexposed: Comparison, nonfinite: Comparison
) -> None:
    flips = cell(draw_layers(warning), 3, "router_experts")
    assert (flips.words[0], flips.told[2], flips.shades[0]) == ("2 flips", "2 flips", 0.0)
    hidden = cell(draw_layers(unexposed), 3, "q_rope")
    assert (hidden.mark, hidden.status, set(hidden.shades)) == ("–", "not exposed", {None})
    assert hidden.told[0] == "ρ not measured"
    facts = dict(cell(draw_layers(nonfinite), 2, "attn_context").facts)
    assert facts["ρ of the worst token"] == "nan at row 0, token 17"
    assert facts["NaN or Inf"] == "64 of the port, 0 of the golden, of 12288 elements"


@pytest.mark.parametrize(
    ("name", "best", "worse", "worst"),
    [
        ("rho", 0.9, 3.0, 500.0),
        ("relative_l2", 0.0, 0.02, 3.0),
        ("norm_ratio", 1.0, 0.98, 0.2),
        ("norm_ratio", 1.0, 1.02, 40.0),
        ("cosine_similarity", 1.0, 0.999, -0.5),
        ("close_fraction", 1.0, 0.95, 0.0),
        ("max_abs_diff", 0.0, 0.03, 20.0),
    ],
)
def test_shade_grows_from_good_to_bad(name: str, best: float, worse: float, worst: float) -> None:
    shades = [shade(BY_NAME[name], value) for value in (best, worse, worst)]
    assert shades[0] == 0.0
    assert shades[1] is not None
    assert 0.0 < shades[1] < 1.0
    assert shades[2] == 1.0


def test_nan_is_the_worst_and_an_unknown_value_has_no_shade() -> None:
    assert shade(BY_NAME["rho"], math.nan) == 1.0
    assert shade(BY_NAME["cosine_similarity"], math.inf) == 1.0
    assert shade(BY_NAME["rho"], None) is None

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.json_codec import decode, encode
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.run import (
    BOUNDARIES,
    Component,
    Mode,
    Run,
    component_run,
    full_run,
    multi_layer_run,
    single_layer_run,
    sweep_run,
)
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span, word_layers

RUNS = {
    "full_model": full_run(62, sites_level="all"),
    "single_layer_7": single_layer_run(7, sites_level="component"),
    "layers_0_to_5": multi_layer_run(Span(0, 6), sites_level="layer"),
    "sweep_0_to_61": sweep_run(Span(0, 62), sites_level="all"),
    "component_7_moe": component_run(7, Component.MOE),
}
FULL = RUNS["full_model"]


def test_presets_have_the_names_and_modes_of_the_design() -> None:
    assert [run.name for run in RUNS.values()] == list(RUNS)
    chained = [name for name, run in RUNS.items() if run.mode is Mode.CHAINED]
    assert chained == ["full_model", "layers_0_to_5"]
    assert {run.mode for run in RUNS.values()} == {Mode.CHAINED, Mode.ISOLATED}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_run_survives_a_manifest(run: Run) -> None:
    assert decode(Run, json.loads(json.dumps(encode(run)))) == run


def test_manifest_names_first_and_last_site() -> None:
    record = encode(component_run(3, Component.ATTENTION))
    assert (record["first_site"], record["last_site"]) == ("input_norm", "attn_delta")


def test_only_a_whole_model_has_sites_outside_its_layers() -> None:
    assert [name for name, run in RUNS.items() if run.model_sites] == ["full_model"]
    assert FULL.model_sites == tuple(ModelSite)


def test_fed_sites_are_not_judged() -> None:
    moe = component_run(7, Component.MOE)
    assert moe.fed_sites == (Site.POST_NORM,)
    assert moe.computed_sites == (
        Site.ROUTER_LOGITS,
        Site.ROUTER_EXPERTS,
        Site.ROUTER_WEIGHTS,
        Site.MOE_DELTA,
    )
    assert Site.INPUT not in single_layer_run(0, sites_level="all").computed_sites


@pytest.mark.parametrize("component", Component)
@pytest.mark.parametrize("graph", [ModelGraph(), ModelGraph(shared_width=64)], ids=["M2", "shared expert"])
def test_component_computes_from_what_it_is_fed_alone(component: Component, graph: ModelGraph) -> None:
    run = component_run(1, component, graph=graph)
    known = set(run.fed_sites)
    for site in run.computed_sites:
        assert set(graph.layer(1).inputs[site]) <= known, site
        known.add(site)


def test_dense_layer_has_an_mlp_for_its_experts() -> None:
    graph = ModelGraph(dense_layers=(0,), dense_width=64)
    assert component_run(0, Component.MOE, graph=graph).computed_sites == (Site.MLP_DELTA,)
    with pytest.raises(UsageError, match="layer 0 has no experts: it is dense"):
        component_run(0, Component.EXPERTS, graph=graph)


def test_each_layer_of_a_run_keeps_the_sites_that_it_has() -> None:
    run = sweep_run(Span(0, 2), sites_level="component", graph=ModelGraph(dense_layers=(0,), dense_width=64))
    assert Site.MLP_DELTA in run.sites_of(0)
    assert Site.MOE_DELTA not in run.sites_of(0)
    assert Site.MLP_DELTA not in run.sites_of(1)
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_every_site_but_the_residual_adds_is_computed_by_a_component() -> None:
    computed = {site for boundary in BOUNDARIES.values() for site in boundary.computed}
    assert set(Site) - computed == {Site.INPUT, Site.ATTN_RESIDUAL, Site.OUTPUT}


def test_run_of_no_sites_or_in_another_order_is_refused() -> None:
    with pytest.raises(UsageError, match="a run keeps no site"):
        replace(FULL, sites=())
    for sites in ((Site.OUTPUT, Site.INPUT), (Site.INPUT, Site.INPUT)):
        with pytest.raises(ValueError, match="not in execution order"):
            replace(FULL, sites=sites)


def test_notation_is_half_open() -> None:
    assert list(Span.parse("2:5")) == [2, 3, 4]
    assert list(Span.parse(" 0:1 ")) == [0]
    assert Span.inclusive(2, 4) == Span(2, 5) == Span.parse("2:5")
    span = Span.single(7)
    assert (list(span), len(span), span.last) == ([7], 1, 7)


@pytest.mark.parametrize("text", ["", "3", "a:b", "1:2:3", "-1:2", ":4", "4:", "1-3"])
def test_unreadable_notation_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--layers '.*' is no span: expected A:B, half-open"):
        Span.parse(text)


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (5, 2), (-1, 2)])
def test_empty_or_negative_span_is_refused(start: int, stop: int) -> None:
    with pytest.raises(UsageError, match=f"layers {start}:{stop} are no span: expected 0 <= start < stop"):
        Span(start, stop)


def test_span_past_the_last_layer_is_refused() -> None:
    assert Span(0, 62).within(62) == Span(0, 62)
    with pytest.raises(
        UsageError, match=r"layer 62 is out of range: expected layers 0 to 61, found layers 60 to 62"
    ):
        Span(60, 63).within(62)


def test_membership_knows_layers_only() -> None:
    span = Span(2, 4)
    assert [layer for layer in range(6) if layer in span] == [2, 3]
    assert "2" not in span


def test_layers_are_worded_as_ranges() -> None:
    assert (str(Span.single(3)), str(Span(3, 6))) == ("layer 3", "layers 3 to 5")
    assert word_layers([0, 1, 2, 5, 7, 8]) == "layers 0-2, 5, 7-8"
    assert word_layers([3]) == "layer 3"
    assert word_layers([1, 0, None]) == "layers 0-1 and model"
    assert word_layers([None]) == "model"

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.json_codec import decode, encode
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
from minimax_tools.model.sites import SITE_INPUTS, ModelSite, Site
from minimax_tools.model.span import Span

RUNS = [
    full_run(62, sites_level="all"),
    single_layer_run(7, sites_level="component"),
    multi_layer_run(Span(0, 6), sites_level="layer"),
    sweep_run(Span(0, 62), sites_level="all"),
    component_run(7, Component.MOE),
]


@pytest.mark.parametrize(
    ("run", "name", "mode"),
    list(
        zip(
            RUNS,
            ("full_model", "single_layer_7", "layers_0_to_5", "sweep_0_to_61", "component_7_moe"),
            (Mode.CHAINED, Mode.ISOLATED, Mode.CHAINED, Mode.ISOLATED, Mode.ISOLATED),
            strict=True,
        )
    ),
)
def test_presets_have_the_names_and_modes_of_the_design(run: Run, name: str, mode: Mode) -> None:
    assert (run.name, run.mode) == (name, mode)


@pytest.mark.parametrize("run", RUNS)
def test_run_survives_a_manifest(run: Run) -> None:
    assert decode(Run, json.loads(json.dumps(encode(run)))) == run


def test_manifest_names_first_and_last_site() -> None:
    record = encode(component_run(3, Component.ATTENTION))
    assert (record["first_site"], record["last_site"]) == ("input_norm", "attn_delta")


def test_only_a_whole_model_has_sites_outside_its_layers() -> None:
    assert [bool(run.model_sites) for run in RUNS] == [True, False, False, False, False]
    assert RUNS[0].model_sites == tuple(ModelSite)


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
def test_component_computes_from_what_it_is_fed_alone(component: Component) -> None:
    boundary = BOUNDARIES[component]
    known = set(boundary.fed)
    for site in boundary.computed:
        assert set(SITE_INPUTS[site]) <= known, site
        known.add(site)


def test_every_site_but_the_residual_adds_is_computed_by_a_component() -> None:
    computed = {site for boundary in BOUNDARIES.values() for site in boundary.computed}
    assert set(Site) - computed == {Site.INPUT, Site.ATTN_RESIDUAL, Site.OUTPUT}


def test_run_without_sites_is_refused() -> None:
    with pytest.raises(UsageError, match="a run keeps no site"):
        replace(RUNS[0], sites=())


@pytest.mark.parametrize("sites", [(Site.OUTPUT, Site.INPUT), (Site.INPUT, Site.INPUT)])
def test_sites_out_of_order_are_a_mistake_of_the_caller(sites: tuple[Site, ...]) -> None:
    with pytest.raises(ValueError, match="not in execution order"):
        replace(RUNS[0], sites=sites)

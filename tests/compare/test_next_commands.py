from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compare.diagnosis.finding import Diagnosis, LayerDiagnosis
from compare.next_commands import after_comparison, after_diagnosis
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.run_commands import RunCommands
from minimax_tools.model.run import multi_layer_run, single_layer_run, sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import Blame, Comparison, Curve, SiteResult, SiteStatus, Verdict

ALL_LAYERS = Span(0, 4)


@pytest.fixture
def sweep(golden: Path) -> RunCommands:
    """The commands of a sweep over the golden's four layers, with every site."""
    capture = Capture.open(golden)
    found = RunCommands.of(capture, capture, model="model")
    assert found is not None
    assert found.port is not None
    made = replace(found.port.provenance, target="port.py:DecoderLayer", options={})
    port = replace(found.port, provenance=made, run=sweep_run(ALL_LAYERS, sites_level="all"))
    return replace(found, golden="golden", run="run", port=port)


def compared(verdict: Verdict, *, layers: Span = ALL_LAYERS, blamed: int | None = None) -> Comparison:
    sites = tuple(SiteResult(layer=layer, site="output", status=SiteStatus.PASS) for layer in layers)
    blame = () if blamed is None else (Blame(layer=blamed, sites=("output",), reason="rho 9"),)
    return Comparison(
        reference="golden", target="run", criteria="noise", verdict=verdict, sites=sites, blame=blame
    )


def starts(commands: tuple[str, ...]) -> list[str]:
    return [" ".join(command.split()[:2]) for command in commands]


def test_failure_traces_the_weights_of_the_blamed_layer_before_it_asks_for_a_name(sweep: RunCommands) -> None:
    weights, diagnose = after_comparison(compared(Verdict.FAIL, blamed=2), sweep)
    assert weights == "mm2-test weights --model model --target port.py:DecoderLayer --layer 2"
    assert diagnose == "mm2-diagnose --model model --golden golden --run run"


@pytest.mark.parametrize(
    ("sites", "has_trace"),
    [(("q_rope",), False), (("attn_context",), False), (("q_norm", "q_rope"), True), (("moe_delta",), True)],
)
def test_weights_are_traced_where_one_may_be_wrong(sweep: RunCommands, sites: Any, has_trace: bool) -> None:
    failed = compared(Verdict.FAIL)
    blame = (Blame(layer=2, sites=sites, reason="rho 9"),)
    commands = starts(after_comparison(replace(failed, blame=blame), sweep))
    assert commands == [*(["mm2-test weights"] if has_trace else []), "mm2-diagnose --model"]


def test_failing_chain_goes_on_to_its_first_wrong_layer_alone(sweep: RunCommands) -> None:
    curve = Curve(points=(), onset=1, command="mm2-test single-layer --layer 1")
    failed = replace(compared(Verdict.FAIL), curve=curve)
    assert starts(after_comparison(failed, sweep)) == ["mm2-test weights", "mm2-test single-layer"]
    # That layer is told without a checkpoint too.
    assert after_comparison(failed, None) == (curve.command,)
    assert after_comparison(compared(Verdict.FAIL), None) == ()


def test_pass_goes_on_to_all_layers_and_then_to_a_chain(sweep: RunCommands) -> None:
    assert starts(after_comparison(compared(Verdict.PASS), sweep)) == ["mm2-test full"]
    assert sweep.port is not None
    alone = replace(sweep, port=replace(sweep.port, run=single_layer_run(1, sites_level="all")))
    assert starts(after_comparison(compared(Verdict.PASS, layers=Span(1, 2)), alone)) == ["mm2-test sweep"]
    chain = replace(sweep, port=replace(sweep.port, run=multi_layer_run(ALL_LAYERS, sites_level="all")))
    assert after_comparison(compared(Verdict.PASS), chain) == ()


def test_warning_traces_the_weights_too(sweep: RunCommands) -> None:
    assert starts(after_comparison(compared(Verdict.WARN), sweep)) == ["mm2-test weights", "mm2-test full"]


def test_incomparable_run_is_followed_by_what_shows_more(sweep: RunCommands) -> None:
    unclear = compared(Verdict.INCOMPARABLE)
    assert sweep.port is not None
    assert sweep.golden_run is not None
    assert after_comparison(unclear, sweep) == ("mm2-test show run",)
    chain = replace(sweep, port=replace(sweep.port, run=multi_layer_run(Span(1, 3), sites_level="layer")))
    (isolated,) = after_comparison(unclear, chain)
    assert isolated.startswith("mm2-test sweep --layers 1:3 ")
    assert "--sites" not in isolated
    poor = replace(sweep, golden_run=replace(sweep.golden_run, sites=(Site.INPUT, Site.OUTPUT)))
    assert starts(after_comparison(unclear, poor)) == ["mm2-gpu extract-all"]
    dump = replace(sweep, port=None)
    assert after_comparison(unclear, dump) == ("mm2-test show run --map-template",)


def test_dump_is_diagnosed_as_it_was_read(sweep: RunCommands) -> None:
    dump = replace(sweep, port=None, reading=("--map", "my map.yaml"))
    (diagnose,) = after_comparison(compared(Verdict.FAIL, blamed=2), dump)
    assert diagnose.endswith("--run run --map 'my map.yaml'")


def test_layer_without_a_name_is_traced_and_run_again(sweep: RunCommands) -> None:
    layer = LayerDiagnosis(layer=3, sites=(Site.OUTPUT,), unexplained=9.0)
    found = Diagnosis(reference="golden", target="run", is_failed=True, layers=(layer,))
    weights, again = after_diagnosis(found, sweep)
    assert weights.endswith("--layer 3")
    assert again.startswith("mm2-test sweep --layers 0:4 ")
    right = Diagnosis(reference="golden", target="run", is_failed=False, layers=())
    assert after_diagnosis(right, sweep) == ()
    stopped = replace(right, unproved="compared 2 of 4 sites")
    assert after_diagnosis(stopped, sweep) == ("mm2-test show run",)

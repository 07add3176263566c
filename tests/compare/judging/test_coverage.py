"""Verdict that a layer is proved, failures that a missing input leaves open, and dtypes of the router's parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.judging.held_weights import find_router_dtypes
from compare.parts import is_proved, leave_undecided
from minimax_tools.metrics.pair_metrics import compare_tensors
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.results.results import RouterDtype, RoutingResult, SiteResult, SiteStatus


def result(site: Site, status: SiteStatus, **changes: Any) -> SiteResult:
    return SiteResult(layer=1, site=str(site), status=status, reason="broken", **changes)


PASS, FAIL, HIDDEN = SiteStatus.PASS, SiteStatus.FAIL, SiteStatus.NOT_EXPOSED


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ((), True),
        (((Site.Q_PROJ, PASS), (Site.MOE_DELTA, PASS), (Site.OUTPUT, HIDDEN)), True),
        (((Site.Q_PROJ, PASS), (Site.MOE_DELTA, HIDDEN), (Site.OUTPUT, FAIL)), True),
        (((Site.Q_PROJ, PASS), (Site.MOE_DELTA, HIDDEN), (Site.OUTPUT, HIDDEN)), False),
        (((Site.Q_PROJ, PASS), (Site.MOE_DELTA, HIDDEN)), False),
        # A component's last site is its end.
        (((Site.Q_PROJ, HIDDEN), (Site.ATTN_CONTEXT, HIDDEN), (Site.ATTN_DELTA, PASS)), True),
        (((Site.Q_PROJ, PASS), (Site.ATTN_CONTEXT, PASS), (Site.ATTN_DELTA, HIDDEN)), False),
    ],
)
def test_a_layer_is_proved_by_its_end(results: Any, expected: bool) -> None:
    assert is_proved([result(site, status) for site, status in results]) is expected


def metrics(value: float) -> Any:
    return compare_tensors(torch.ones(2, 2), torch.tensor([[1.0, value], [1.0, 1.0]]), rtol=1e-2, atol=1e-3)


ROUTING = RoutingResult(num_tokens=2, num_flipped=1, num_explained=0, widest_unexplained_margin=0.1)


@pytest.mark.parametrize(
    ("found", "is_open"),
    [
        (result(Site.OUTPUT, FAIL, metrics=metrics(2.0)), True),
        (result(Site.ROUTER_EXPERTS, FAIL, routing=ROUTING), True),
        (result(Site.OUTPUT, FAIL, metrics=metrics(float("nan"))), False),
        (result(Site.OUTPUT, FAIL), False),
        (result(Site.OUTPUT, PASS, metrics=metrics(2.0)), False),
        (result(Site.OUTPUT, SiteStatus.WARN, metrics=metrics(2.0)), False),
    ],
    ids=["values", "experts", "NaN", "no values", "passed", "warned"],
)
def test_failures_of_values_are_left_open_without_inputs(found: SiteResult, is_open: bool) -> None:
    target: Any = SimpleNamespace(may_omit_inputs=True)
    left = leave_undecided({Site.OUTPUT: found}, target)[Site.OUTPUT]
    if is_open:
        assert (left.status, left.reason) == (SiteStatus.NOT_JUDGED, "broken; its inputs are not held")
    else:
        assert left is found
    whole: Any = SimpleNamespace(may_omit_inputs=False)
    assert leave_undecided({Site.OUTPUT: found}, whole)[Site.OUTPUT] is found


def reference(graph: ModelGraph | None = None, **dtypes: str) -> Any:
    description = SimpleNamespace(provenance=SimpleNamespace(dtypes=dtypes))
    return SimpleNamespace(
        known_description=description, description=description, graph=graph or ModelGraph()
    )


def flips(*numbers: int) -> list[SiteResult]:
    results = [SiteResult(layer=0, site="output", status=SiteStatus.PASS)]
    for number in numbers:
        routing = RoutingResult(
            num_tokens=9, num_flipped=number + 2, num_explained=2, widest_unexplained_margin=None
        )
        results.append(SiteResult(layer=0, site="router_experts", status=SiteStatus.PASS, routing=routing))
    return results


def find_dtypes(golden: Any, found: dict[str, str], *numbers: int) -> tuple[RouterDtype, ...]:
    target: Any = SimpleNamespace(observed_dtypes=found)
    return find_router_dtypes(golden, target, flips(*numbers))


GOLDEN = reference(router_gate="float32", correction_bias="float32")
BOTH = {"router_gate": "bfloat16", "correction_bias": "bfloat16", "unheard": "bfloat16"}


def test_parts_in_another_dtype_are_told_by_name() -> None:
    bias, gate = find_dtypes(GOLDEN, BOTH)
    assert (bias.name, bias.reference, bias.target) == ("correction_bias", "float32", "bfloat16")
    assert gate.name == "router_gate"
    assert bias.consequence.startswith("in BF16 it moves in steps of 0.03")
    assert gate.consequence.startswith("its rounding moves every score")


def test_the_same_dtype_and_an_unknown_golden_tell_nothing() -> None:
    assert find_dtypes(GOLDEN, {"router_gate": "float32"}) == ()
    assert find_dtypes(SimpleNamespace(known_description=None), BOTH) == ()


def test_flips_of_the_run_are_counted() -> None:
    for numbers, told in (((), "no token"), ((0, 0), "no token"), ((0, 1), "1 token"), ((2, 1), "3 tokens")):
        [found] = find_dtypes(GOLDEN, {"router_gate": "bfloat16"}, *numbers)
        others = ", tokens of other runs may" if told == "no token" else ""
        words = f"{told} of this run chose other experts beyond noise{others}"
        assert found.consequence.endswith(f"; {words}")


def test_a_golden_in_bfloat16_rounds_too() -> None:
    [found] = find_dtypes(reference(router_gate="bfloat16"), {"router_gate": "float32"})
    assert found.consequence.startswith("no token of this run")


@pytest.mark.parametrize(("dtype", "is_told"), [("bfloat16", False), ("float32", False), ("float8", True)])
def test_router_in_the_models_dtype_may_be_held_in_a_finer_one(dtype: str, is_told: bool) -> None:
    golden = reference(ModelGraph(has_float32_router=False), router_gate="bfloat16")
    assert bool(find_dtypes(golden, {"router_gate": dtype})) is is_told

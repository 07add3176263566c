"""Parts of the router in another dtype: which are told, and what is said of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from compare.judging.held_weights import find_router_dtypes
from minimax_tools.results.results import RouterDtype, RoutingResult, SiteResult, SiteStatus


def reference(**dtypes: str) -> Any:
    description = SimpleNamespace(provenance=SimpleNamespace(dtypes=dtypes))
    return SimpleNamespace(known_description=description, description=description)


def flips(*numbers: int) -> list[SiteResult]:
    results = [SiteResult(layer=0, site="output", status=SiteStatus.PASS)]
    for number in numbers:
        routing = RoutingResult(
            num_tokens=9, num_flipped=number + 2, num_explained=2, widest_unexplained_margin=None
        )
        results.append(SiteResult(layer=0, site="router_experts", status=SiteStatus.PASS, routing=routing))
    return results


def find(golden: Any, found: dict[str, str], *numbers: int) -> tuple[RouterDtype, ...]:
    target: Any = SimpleNamespace(observed_dtypes=found)
    return find_router_dtypes(golden, target, flips(*numbers))


GOLDEN = reference(router_gate="float32", correction_bias="float32")
BOTH = {"router_gate": "bfloat16", "correction_bias": "bfloat16", "unheard": "bfloat16"}


def test_parts_in_another_dtype_are_told_by_name() -> None:
    bias, gate = find(GOLDEN, BOTH)
    assert (bias.name, bias.reference, bias.target) == ("correction_bias", "float32", "bfloat16")
    assert gate.name == "router_gate"
    assert bias.consequence.startswith("in BF16 it moves in steps of 0.03")
    assert gate.consequence.startswith("its rounding moves every score")


def test_the_same_dtype_and_an_unknown_golden_tell_nothing() -> None:
    assert find(GOLDEN, {"router_gate": "float32"}) == ()
    assert find(SimpleNamespace(known_description=None), BOTH) == ()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((), "no token of this run chose other experts beyond noise, tokens of other runs may"),
        ((0, 0), "no token of this run chose other experts beyond noise, tokens of other runs may"),
        ((0, 1), "1 token of this run chose other experts beyond noise"),
        ((2, 1), "3 tokens of this run chose other experts beyond noise"),
    ],
)
def test_flips_of_the_run_are_counted(numbers: tuple[int, ...], words: str) -> None:
    [found] = find(GOLDEN, {"router_gate": "bfloat16"}, *numbers)
    assert found.consequence.endswith(f"; {words}")


def test_a_golden_in_bfloat16_rounds_too() -> None:
    [found] = find(reference(router_gate="bfloat16"), {"router_gate": "float32"})
    assert found.consequence.startswith("no token of this run")

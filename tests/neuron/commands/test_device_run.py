"""Text of a run's report: graphs, and warnings about them."""

from __future__ import annotations

from typing import Any

from neuron.commands.device_run import find_warnings
from neuron.devices.compiler import GraphBreak
from neuron.runs.run_profile import CompileReport, RunReport

BREAK = GraphBreak(reason="Failed to trace builtin operator", place='port.py:7 `print("x")`')


def report(*, first_layer: int = 1, later_layers: int = 0, **told: Any) -> RunReport:
    compiles = CompileReport(first_layer=first_layer, later_layers=later_layers, fallbacks=(), **told)
    return RunReport(compiles=compiles)


def test_break_is_warned_of_with_its_line_and_reason() -> None:
    (warning,) = find_warnings(report(compiler="eager", graph_breaks=(BREAK,)))
    assert warning == (
        'the graph breaks at port.py:7 `print("x")`: Failed to trace builtin operator: this line runs uncompiled; '
        "in a loop, its whole function does"
    )


def test_compiler_that_made_no_graph_is_warned_of() -> None:
    (warning,) = find_warnings(report(first_layer=0, compiler="eager"))
    assert warning.startswith("torch.compile made no graph")
    assert list(find_warnings(report(first_layer=0))) == []
    assert list(find_warnings(report(compiler="eager"))) == []
    # Breaks say why there is none.
    (warning,) = find_warnings(report(first_layer=0, compiler="eager", graph_breaks=(BREAK,)))
    assert warning.startswith("the graph breaks at")

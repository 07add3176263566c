"""Bisections as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from minimax_tools.model.span import Span
from minimax_tools.results.probes import Bisection, BisectionFinding, Chain, Probe
from minimax_tools.results.results import Verdict
from reports.bisection import bisection_record, next_commands, render_bisection

ARGUMENTS = ("--model", "my model", "--golden", "golden", "--target", "port.py:Port")


def chain(start: int, stop: int, excess: float, visible: float = 0.015) -> Chain:
    is_right = excess <= 1
    return Chain(
        span=Span(start, stop),
        is_right=is_right,
        excess=excess,
        visible=visible,
        reason="" if is_right else "error 9× the noise",
    )


def bisection(*probes: Probe, findings: tuple[Chain, ...] = ()) -> Bisection:
    return Bisection(
        span=Span(0, 8),
        reference="golden",
        target="port.py:Port",
        arguments=ARGUMENTS,
        probes=probes,
        findings=tuple(BisectionFinding(chain=found) for found in findings),
        sweep_visible=0.0004,
    )


def draw(found: Bisection) -> str:
    return render_bisection(found)


@pytest.fixture
def culprit() -> Bisection:
    first = Probe(span=Span(0, 4), chains=(chain(0, 2, 0.3), chain(2, 4, 40.0, visible=0.017)))
    right = Probe(span=Span(2, 3), chains=(chain(2, 3, 0.5, visible=0.006),))
    wrong = Probe(span=Span(3, 4), chains=(chain(3, 4, float("inf"), visible=0.006),))
    return bisection(first, right, wrong, findings=(wrong.chains[0],))


def test_words(culprit: Bisection, expect_text: Callable[[str, Mapping[str, str]], None]) -> None:
    drift, wrong = chain(0, 2, 1.1), chain(4, 5, 9.0)
    behind = bisection(
        Probe(span=Span(0, 2), chains=(drift,)),
        Probe(span=Span(4, 5), chains=(wrong,)),
        findings=(drift, wrong),
    )
    clean = bisection(Probe(span=Span(0, 8), chains=tuple(chain(at, at + 2, 0.4) for at in range(0, 8, 2))))
    alone = bisection(Probe(span=Span(0, 2), chains=(drift,)), findings=(drift,))
    found = {"culprit": culprit, "culprit behind a drift": behind, "clean": clean, "drift": alone}
    texts = {name: "\n".join((draw(one), *next_commands(one))) for name, one in found.items()}
    expect_text("bisection.txt", texts)


def test_record_has_the_keys_of_every_verdict_and_is_plain_json(culprit: Bisection) -> None:
    record = json.loads(json.dumps(bisection_record(culprit), allow_nan=False))
    assert (record["verdict"], record["compared"], record["of"]) == ("fail", 3, 8)
    assert [(blame["layer"], blame["sites"]) for blame in record["blame"]] == [(3, ["output"])]
    assert record["probes"][2]["chains"][0]["error_of_limit"] == "inf"
    assert record["probes"][0]["verdict"] == "fail"
    assert record["probes"][1] == {
        "start_layer": 2,
        "end_layer": 2,
        "verdict": "pass",
        "chains": [
            {
                "start_layer": 2,
                "end_layer": 2,
                "verdict": "pass",
                "error_of_limit": 0.5,
                "smallest_visible": 0.006,
                "reason": "",
            }
        ],
    }


@pytest.mark.parametrize(("excess", "verdict"), [(1.5, Verdict.WARN), (2.5, Verdict.FAIL)])
def test_chain_that_is_wrong_alone_warns_and_fails_where_it_is_far_beyond_its_limit(
    excess: float, verdict: Verdict
) -> None:
    drift = chain(2, 4, excess)
    found = bisection(Probe(span=Span(0, 4), chains=(chain(0, 2, 0.3), drift)), findings=(drift,))
    assert found.verdict is verdict
    assert (found.culprits, len(found.drifts)) == ((), 1)
    assert bisection_record(found)["blame"] == []

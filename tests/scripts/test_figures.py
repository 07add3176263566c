from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from figures import Figure, print_figures


@pytest.mark.parametrize(
    ("figure", "holds", "goal"),
    [
        (Figure.at_most("a", 1.25, 1.25), True, "<= 1.25"),
        (Figure.at_most("a", 1.2501, 1.25), False, "<= 1.25"),
        (Figure.at_least("a", 5, 5), True, ">= 5"),
        (Figure.at_least("a", 4.99, 5), False, ">= 5"),
        (Figure.exactly("a", 0, 0), True, "= 0"),
        (Figure.exactly("a", 4096, 0), False, "= 0"),
        (Figure.exactly("a", 1.004, 1, tolerance=0.005), True, "= 1"),
        (Figure.exactly("a", 0.99, 1, tolerance=0.005), False, "= 1"),
        (Figure.at_most("a", float("nan"), 1), False, "<= 1"),
        (Figure.plain("a", 3.0), True, "-"),
    ],
)
def test_figure_holds_where_its_goal_is_reached(figure: Figure, holds: bool, goal: str) -> None:
    assert (figure.holds, figure.goal) == (holds, goal)


def test_goal_that_rounding_would_reach_is_missed() -> None:
    assert not Figure.at_most("a", 1.2500001, 1.25).holds


@pytest.mark.parametrize("as_json", [False, True])
def test_missed_goal_ends_with_1(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    reached, missed = Figure.at_most("speed", 1, 2), Figure.at_least("size", 1, 2)
    assert print_figures("name", [reached], as_json=as_json) == 0
    capsys.readouterr()
    assert print_figures("name", [reached, missed], as_json=as_json) == 1
    text = capsys.readouterr().out
    if as_json:
        record = json.loads(text)
        assert record["benchmark"] == "name"
        assert record["figures"][1] == {"figure": "size", "value": 1, "goal": ">= 2", "holds": False}
    else:
        assert [line.split()[-1] for line in text.splitlines()[1:]] == ["holds", "MISSED"]

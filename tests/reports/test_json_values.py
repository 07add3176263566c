from __future__ import annotations

import math

import pytest

from minimax_tools.results.results import Blame, Verdict
from reports.data import to_json


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1.5, 1.5),
        (math.nan, None),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (True, True),
        (7, 7),
        (None, None),
    ],
)
def test_only_what_json_cannot_hold_changes(value: object, found: object) -> None:
    assert to_json(value) == found


def test_values_inside_values_are_reached() -> None:
    assert to_json({5: [(math.inf, Verdict.FAIL)]}) == {"5": [["inf", "fail"]]}


def test_values_with_names_become_objects() -> None:
    blame = Blame(layer=None, sites=("logits",), reason="another head")
    record = {
        "layer": None,
        "sites": ["logits"],
        "reason": "another head",
        "right": [],
        "operation": "",
        "is_of_weights": False,
        "in_chunks": False,
    }
    assert to_json([blame]) == [record]

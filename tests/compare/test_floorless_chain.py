"""Chained runs held against a golden that kept no floor: what was handed on excuses noise, and no fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Judged = Callable[[str], dict[str, Any]]

REPOSITORY = Path(__file__).parents[2]
WRONG = REPOSITORY / "tests" / "ports" / "one_wrong_layer.py"
TRANSFORMERS = REPOSITORY / "scripts" / "examples" / "transformers_port.py"
FAULTY_LAYER = 1


@pytest.fixture
def judged(toy: Path, copyist: Any, command: Command, tmp_path: Path) -> Judged:
    """The record of a chained run of a target through all layers of the toy."""
    golden = copyist.golden(noise_floor="off")

    def judge(target: str) -> dict[str, Any]:
        arguments = ("full", "--model", toy, "--golden", golden, "--target", target, "--sites", "all")
        options = ("--backend", "cpu", "--output-dir", tmp_path / "run", "--json", "--quiet")
        return json.loads(command(mm2_test, *arguments, *options).stdout)

    return judge


def test_swapped_gate_and_up_are_found_where_they_are(judged: Judged) -> None:
    record = judged(f"{WRONG}:SwappedGateUp_at_{FAULTY_LAYER}")
    assert record["verdict"] == "fail"
    assert (record["blame"][0]["layer"], record["blame"][0]["sites"]) == (FAULTY_LAYER, ["moe_delta"])


@pytest.mark.parametrize(
    "target",
    [
        "builtin",
        f"{TRANSFORMERS}:RoundedWeights",
        *(
            pytest.param(target, marks=pytest.mark.slow)
            for target in (
                "reference",
                *(f"{TRANSFORMERS}:{name}" for name in ("Eager", "BatchedExperts", "LaterPositions")),
            )
        ),
    ],
    ids=lambda target: target.rpartition(":")[2],
)
def test_right_implementations_pass(target: str, judged: Judged) -> None:
    record = judged(target)
    assert (record["verdict"], record["blame"]) == ("pass", [])

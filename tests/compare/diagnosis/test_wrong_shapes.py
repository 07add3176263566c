"""A layer that fails by shapes alone is told so: no mistake of the catalogue is tried on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.diagnosis.cli import main as mm2_diagnose
from compare.sides.pairing import find_mismatch
from neuron.cli import main as mm2_test

PORTS = Path(__file__).parents[2] / "ports" / "tokens_first.py"
# Of queries with 8 heads, 48 tokens, and 64 channels in a head.
SHAPES = "expected (2, 8, 48, 64), found (2, 8, 64, 48): axes 2 and 3 are exchanged"


@pytest.fixture
def diagnose(
    toy: Path, golden: Path, command: Callable[..., click.testing.Result], tmp_path: Path
) -> Callable[..., click.testing.Result]:
    """Runs a port of `tokens_first.py` on the golden's input of layer 1, and diagnoses it."""

    def run(name: str, *options: object) -> click.testing.Result:
        paths = ("--model", toy, "--golden", golden)
        port = ("--target", f"{PORTS}:{name}", "--backend", "cpu", "--output-dir", tmp_path / "run")
        command(mm2_test, "single-layer", "--layer", 1, *paths, *port, "--quiet")
        return command(mm2_diagnose, *paths, "--run", tmp_path / "run", *options, "--quiet")

    return run


def test_text_tells_the_shapes_and_tries_no_mistake(diagnose: Any) -> None:
    result = diagnose("OtherShape")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 1
    assert text.startswith("FAIL: layer 1, q_rope and k_rope: the shape is wrong")
    assert "Layer 1: the shape is wrong, and no other site fails (ρ " in text
    assert f"q_rope: shape: {SHAPES}" in text
    assert "No mistake of the catalogue was tried: none changes a shape." in text
    assert "no known mistake" not in text


def test_json_has_the_form_of_a_diagnosis_that_names_nothing(diagnose: Any) -> None:
    result = diagnose("OtherShape", "--json")
    record = json.loads(result.stdout)
    (layer,) = record["layers"]
    assert (result.exit_code, record["verdict"], record["diagnosis"]) == (1, "fail", [])
    assert (layer["num_hypotheses"], layer["nearest"], layer["is_right"]) == (0, [], False)
    assert layer["unexplained"] < 1.5
    assert [note.partition(":")[0] for note in layer["notes"]] == ["q_rope", "k_rope"]


def test_there_is_nothing_to_prove_of_a_shape(diagnose: Any) -> None:
    result = diagnose("OtherShape", "--prove")
    assert result.exit_code == 1
    assert "Nothing to prove: no mistake was named." in result.stdout


def test_mistake_that_was_asked_for_is_tried(diagnose: Any) -> None:
    record = json.loads(diagnose("OtherShape", "--mistake", "rope_theta", "--json").stdout)
    assert record["layers"][0]["num_hypotheses"] > 0


def test_wrong_figure_beside_a_wrong_shape_is_searched(diagnose: Any) -> None:
    result = diagnose("OtherShapeAndTheta", "--json")
    record = json.loads(result.stdout)
    assert result.exit_code == 1
    assert record["diagnosis"][0]["mistake"] == "rope_theta"


@pytest.mark.parametrize(
    ("expected", "found", "words"),
    [
        ((2, 8, 3, 4), (2, 3, 8, 4), ": axes 1 and 2 are exchanged"),
        ((2, 8, 3), (3, 8, 2), ": axes 0 and 2 are exchanged"),
        ((2, 8, 3, 4), (2, 3, 4, 8), ""),
        ((2, 8, 3, 4), (2, 8, 3, 5), ""),
        ((2, 8, 3, 4), (2, 3, 9, 4), ""),
        ((2, 8, 3, 4), (2, 8, 12), ""),
    ],
)
def test_two_exchanged_axes_are_told(expected: tuple[int, ...], found: tuple[int, ...], words: str) -> None:
    mismatch = find_mismatch(torch.zeros(expected), torch.zeros(found))
    assert mismatch == f"shape: expected {expected}, found {found}{words}"

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest

from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
RIGHT = [
    "port.py:DecoderLayer",
    "transformers_port.py:Same",
    "transformers_port.py:Eager",
    "transformers_port.py:BatchedExperts",
]


@pytest.mark.parametrize("target", RIGHT)
def test_right_example_passes_every_layer(
    target: str, toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    result = _sweep(command, target, toy, golden, tmp_path)
    record = json.loads(result.stdout)
    assert (result.exit_code, record["verdict"]) == (0, "pass")
    assert record["compared"] > 0


def test_swapped_device_layer_is_blamed_on_the_experts(
    toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    result = _sweep(command, "swapped_device_layer.py:SwappedDeviceLayer", toy, golden, tmp_path)
    record = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [(blame["layer"], blame["sites"]) for blame in record["blame"]] == [
        (layer, ["moe_delta"]) for layer in range(4)
    ]


def _sweep(command: Command, target: str, toy: Path, golden: Path, tmp_path: Path) -> click.testing.Result:
    return command(
        mm2_test,
        *("sweep", "--model", toy, "--golden", golden, "--target", EXAMPLES / target),
        *("--backend", "cpu", "--output-dir", tmp_path / "run", "--json", "--quiet"),
    )

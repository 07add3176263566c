"""`--also`: further outputs of a port are stored, shown, and never judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site
from neuron.cli import main as mm2_test

EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"
CACHED = f"{EXAMPLES / 'cached_port.py'}:DecoderLayer"


@pytest.fixture
def layer(run: Any, on_small: tuple[object, ...], tmp_path: Path) -> Any:
    """Runs layer 1 of the example port with a cache."""
    sides = (*on_small, "--target", CACHED, "--backend", "cpu", "--quiet")

    def run_port(*options: object) -> Any:
        return run("single-layer", "--layer", 1, *sides, "--output-dir", tmp_path / "run", *options)

    return run_port


@pytest.mark.parametrize("compiler", ["off", "eager"])
def test_further_outputs_are_stored_shown_and_not_judged(
    layer: Any, command: Any, tmp_path: Path, compiler: str
) -> None:
    done = layer("--also", "cache=:output[1]", "--compile", compiler, "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert (record["compared"], record["of"]) == (17, 17)
    assert "further outputs of the run, stored and not judged: cache.0, cache.1" in record["notes"]
    capture = Capture.open(tmp_path / "run")
    keys, values = (capture.read_further(1, name) for name in ("cache.0", "cache.1"))
    assert torch.equal(keys, capture.read(1, Site.K_ROPE))
    assert torch.equal(values.transpose(1, 2).flatten(2), capture.read(1, Site.V_PROJ))
    shown = command(mm2_test, "show", tmp_path / "run").stdout
    assert "further outputs, never judged" in shown
    assert "cache.1" in shown
    record = json.loads(command(mm2_test, "show", tmp_path / "run", "--json").stdout)
    assert [one["name"] for one in record["layers"][0]["further"]] == ["cache.0", "cache.1"]


def test_another_request_is_another_run(layer: Any, tmp_path: Path) -> None:
    assert layer().exit_code == 0
    assert Capture.open(tmp_path / "run").further(1) == ()
    refused = layer("--also", "cache=:output[1]")
    assert refused.exit_code == 3
    assert "found other options.also" in refused.stderr


def test_a_damaged_one_is_told_by_show_and_the_rest_is_shown(
    layer: Any, command: Any, tmp_path: Path
) -> None:
    assert layer("--also", "cache=:output[1]").exit_code == 0
    file = tmp_path / "run" / "layer_1.further.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    shown = command(mm2_test, "show", tmp_path / "run")
    assert shown.exit_code == 3
    assert "cache.1" in shown.stdout
    assert "moe_delta" in shown.stdout


def test_saved_run_with_others_is_refused(layer: Any) -> None:
    assert layer("--also", "cache=:output[1]").exit_code == 0
    assert layer("--also", "cache=:output[1]", "--skip-compile").exit_code == 0
    refused = layer("--also", "gate=moe.router", "--skip-compile")
    assert refused.exit_code == 3
    assert "expected gate=moe.router, found cache=:output[1]" in refused.stderr


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (("--also", "cache=:output[7]"), 3, "showed no tensor at the further output cache=:output[7]"),
        (("--also", "cache=self_atn"), 3, "Did you mean self_attn"),
        (("--also", "cache"), 2, "expected NAME=PATH"),
        (("--also", "cache=:output[1]", "--decode", 2), 2, "--decode runs several"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(
    layer: Any, options: tuple[object, ...], exit_code: int, message: str
) -> None:
    refused = layer(*options)
    assert refused.exit_code == exit_code
    assert message in refused.stderr

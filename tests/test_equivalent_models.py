"""Equivalent models, written in other numbers: mm2's verdict on a port does not change."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click.testing
import pytest

from gpu_reference.cli import main as mm2_gpu
from neuron.cli import main as mm2_test

sys.path.append(str(Path(__file__).parent))

from equivalent import CHANGES, rewrite_checkpoint

Command = Callable[..., click.testing.Result]

LEARNED = Path(__file__).parent / "models" / "learned"
PLANTED = Path(__file__).parent / "ports" / "planted.py"
CHAINS = {
    "scaled": [name for name in CHANGES if name.startswith("scale")],
    "permuted": [name for name in CHANGES if name.startswith("permute")],
}
RIGHT = ("reference", "builtin")
WRONG = {
    f"{PLANTED}:SwappedGateUp": "moe_delta",
    f"{PLANTED}:TiledKeyValueHeads": "attn_context",
    f"{PLANTED}:KeyNormDivisor": "k_norm",
    # In the last layers hardly a choice hangs on the bias: the port's own logits tell.
    f"{PLANTED}:NoCorrectionBias": "router_experts",
}


# What the changes touch most.
NEAREST = ("moe_delta",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A checkpoint and its golden."""

    model: Path
    golden: Path


@pytest.fixture(scope="module", params=[pytest.param("as trained", marks=pytest.mark.slow), *CHAINS])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The learned model, and it with its channels scaled, and with experts, heads and channels exchanged."""
    root = tmp_path_factory.mktemp("written")
    model = LEARNED
    if request.param in CHAINS:
        model = root / "model"
        rewrite_checkpoint(LEARNED, model, changes=CHAINS[request.param], seed=1)
    arguments = ["extract-all", "--model", model, "--prompts-file", LEARNED / "held_out.json"]
    arguments += ["--max-length", 96, "--output-dir", root / "golden", "--quiet"]
    result = click.testing.CliRunner().invoke(mm2_gpu, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return Written(model=model, golden=root / "golden")


@pytest.mark.parametrize("target", [RIGHT[0], pytest.param(RIGHT[1], marks=pytest.mark.slow)])
def test_right_port_passes(target: str, written: Written, command: Command, tmp_path: Path) -> None:
    record = sweep(target, written, command, tmp_path)
    assert (record["verdict"], record["blame"]) == ("pass", [])


@pytest.mark.parametrize(
    ("target", "site"),
    [
        pytest.param(target, site, id=site, marks=() if site in NEAREST else pytest.mark.slow)
        for target, site in WRONG.items()
    ],
)
def test_wrong_port_fails_at_the_same_site_in_every_layer(
    target: str, site: str, written: Written, command: Command, tmp_path: Path
) -> None:
    record = sweep(target, written, command, tmp_path)
    assert record["verdict"] == "fail"
    assert [blame["layer"] for blame in record["blame"]] == [0, 1, 2, 3]
    assert all(blame["sites"][0] == site for blame in record["blame"])


def sweep(target: str, written: Written, command: Command, tmp_path: Path) -> dict[str, Any]:
    result = command(
        mm2_test,
        *("sweep", "--model", written.model, "--golden", written.golden, "--target", target),
        *("--backend", "cpu", "--output-dir", tmp_path / "run", "--json", "--quiet"),
    )
    record: dict[str, Any] = json.loads(result.stdout)
    return record

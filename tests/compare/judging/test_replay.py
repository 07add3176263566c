"""Tokens past a flip, judged against the golden with the port's own experts: a real port without a correction bias."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from damage.tampering import change_tensor, sign

from compare.cli import main as mm2_compare
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Judge = Callable[..., Comparison]

PORTS = Path(__file__).parents[2] / "ports" / "planted.py"
LAYER = 2
BEHIND = (Site.ROUTER_WEIGHTS, Site.MOE_DELTA, Site.OUTPUT)


def site_of(comparison: Comparison, site: Site) -> SiteResult:
    (found,) = [one for one in comparison.of_layer(LAYER) if one.site == site]
    return found


def blamed(comparison: Comparison) -> list[tuple[str, ...]]:
    return [blame.sites for blame in comparison.blame]


@pytest.fixture(scope="module")
def flipped(run_port: Callable[..., Path]) -> Path:
    """A run of a layer without its correction bias: most tokens go to other experts."""
    return run_port("single-layer", "planted.py:NoCorrectionBias", "--layer", LAYER)


def test_right_experts_behind_a_wrong_choice_pass(flipped: Path, toy: Path, judge: Judge) -> None:
    comparison = judge(flipped, model=toy)
    assert blamed(comparison) == [("router_experts",)]
    routing = site_of(comparison, Site.ROUTER_EXPERTS).routing
    assert routing is not None
    for site in BEHIND:
        result = site_of(comparison, site)
        assert (result.status, result.num_set_aside) == (SiteStatus.PASS, 0)
        assert result.num_replayed == routing.num_flipped > 50
        assert result.noise is not None
        # In units of the variant that strays furthest.
        assert 0.6 < result.noise.whole < 1.2
        assert result.noise.token_worst < 2.5


def test_command_with_a_model_judges_them(flipped: Path, golden: Path, toy: Path, command: Command) -> None:
    arguments = ("--golden", golden, "--run", flipped, "--model", toy, "--quiet")
    result = command(mm2_compare, *arguments)
    assert result.exit_code == 1
    assert "not judged behind them" not in result.stdout
    # The worst flips are named: where, which experts, and how far apart they are.
    assert "apart in score" in result.stdout


def test_golden_in_float32_is_replayed_without_rounding(tmp_path: Path, command: Command) -> None:
    model, golden = tmp_path / "model", tmp_path / "golden"
    synthesize(model, model=SyntheticModel(), dtype=torch.float32, shard_size_bytes=None, seed=0)
    common = ("--model", model, "--dtype", "float32", "--quiet")
    made = command(mm2_gpu, "extract-all", *common, "--seq-len", "24,17", "--output-dir", golden)
    assert made.exit_code == 0, made.output
    port = ("--target", f"{PORTS}:NoCorrectionBias", "--backend", "cpu", "--output-dir", tmp_path / "run")
    result = command(mm2_test, "single-layer", "--layer", LAYER, *common, "--golden", golden, *port, "--json")
    assert [blame["sites"] for blame in json.loads(result.stdout)["blame"]] == [["router_experts"]]


def test_experts_that_are_wrong_past_a_flip_alone_are_found(
    flipped: Path, golden: Path, toy: Path, judge: Judge, tmp_path: Path
) -> None:
    """Plant a mistake that shows on no token whose experts are the golden's."""
    wrong, name = tmp_path / "wrong", f"layer_{LAYER}.safetensors"
    shutil.copytree(flipped, wrong)
    mine, theirs = (
        load_file(folder / name)["router_experts"].sort(-1).values for folder in (golden, flipped)
    )
    past = (mine != theirs).any(-1)[..., None]
    change_tensor(wrong, name, "moe_delta", lambda tensor: torch.where(past, tensor * 0.9, tensor))
    sign(wrong, with_statistics=True)
    assert blamed(judge(wrong)) == [("router_experts",)]
    assert blamed(judge(wrong, model=toy)) == [("router_experts",), ("moe_delta",)]


def test_weights_are_not_read_where_no_token_flips(copyist: Any, judge: Judge, tmp_path: Path) -> None:
    run = copyist.device_run(name="same")
    assert judge(run, model=tmp_path / "nowhere", pattern="layer_0").blame == ()

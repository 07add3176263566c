"""Mistakes that real ports had, planted in the example port: each is found and placed, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

PORTS = Path(__file__).parent / "ports" / "planted.py"
LAYER = 2

# What each is blamed for: the first sites that are wrong while what they are computed from is right.
MISTAKES = {
    "NormPerHeadWeights": ["q_norm", "k_norm"],
    "NormByHead": ["q_norm", "k_norm"],
    "NormPerRank": ["q_norm", "k_norm"],
    "KeyNormDivisor": ["k_norm"],
    "FullRotary": ["q_rope", "k_rope"],
    "DefaultTheta": ["q_rope", "k_rope"],
    "InterleavedRotary": ["q_rope", "k_rope"],
    "TiledKeyValueHeads": ["attn_context"],
    "SlidingWindow": ["attn_context"],
    "AttentionScale": ["attn_context"],
    "SwappedKeyValue": ["k_proj", "v_proj"],
    "QueryWithoutScale": ["q_proj"],
    "OutputProjectionNeverLoaded": ["attn_delta"],
    "ResidualFromElsewhere": ["attn_residual"],
    "NormMiscompiled": ["post_norm"],
    "QuantisedGate": ["router_logits"],
    # The scores, which no site shows, choose the experts and weigh them.
    "SoftmaxRouter": ["router_experts", "router_weights"],
    "NoCorrectionBias": ["router_experts"],
    "UnlikeliestExperts": ["router_experts"],
    "Bfloat16CorrectionBias": ["router_experts"],
    "BiasedWeights": ["router_weights"],
    "WeightsNotNormalised": ["router_weights"],
    "SwappedGateUp": ["moe_delta"],
    "UpPlusOne": ["moe_delta"],
    "GeluExperts": ["moe_delta"],
    "LocalExpertsOnly": ["moe_delta"],
    "LaterRowsDiffer": ["moe_delta"],
    "NanInOneRow": ["moe_delta"],
    "NoCorrectionBiasAndSwappedGateUp": ["router_experts", "moe_delta"],
}
# Others of these are blamed on the same sites: slow tests run them.
MORE = {
    *(
        "NormPerHeadWeights",
        "NormByHead",
        "FullRotary",
        "InterleavedRotary",
        "SlidingWindow",
        "AttentionScale",
    ),
    *("UnlikeliestExperts", "Bfloat16CorrectionBias", "WeightsNotNormalised"),
    *("UpPlusOne", "GeluExperts", "LocalExpertsOnly"),
    *("BlackBoxTiledKeyValueHeads", "BlackBoxNoCorrectionBias"),
}
NO_MISTAKES = ["ShiftedPositions", "GarbageInPadding", "Bfloat16Weights", "BlackBoxClean"]
BLACK_BOXES = {
    "BlackBoxSwappedGateUp": "moe_delta",
    "BlackBoxTiledKeyValueHeads": "attn_context",
    "BlackBoxNoCorrectionBias": "router_experts",
}


def cases(table: dict[str, Any]) -> list[Any]:
    """Return the parameters of a table: name, and what it is blamed for."""
    return [
        pytest.param(name, sites, id=name, marks=pytest.mark.slow if name in MORE else ())
        for name, sites in table.items()
    ]


@pytest.mark.parametrize(("name", "sites"), cases(MISTAKES))
def test_mistake_is_blamed_on_its_site(
    name: str, sites: list[str], toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    exit_code, record = _judge(name, toy, golden, command, tmp_path)
    assert (exit_code, record["verdict"]) == (1, "fail")
    assert [(blame["layer"], blame["sites"]) for blame in record["blame"]] == [
        (LAYER, [site]) for site in sites
    ]


@pytest.mark.parametrize("name", NO_MISTAKES)
def test_what_is_no_mistake_passes(
    name: str, toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    exit_code, record = _judge(name, toy, golden, command, tmp_path)
    assert (exit_code, record["verdict"], record["blame"]) == (0, "pass", [])


@pytest.mark.parametrize(("name", "site"), cases(BLACK_BOXES))
def test_black_box_is_found_out_and_the_blame_encloses_the_site(
    name: str, site: str, toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    exit_code, record = _judge(name, toy, golden, command, tmp_path)
    assert exit_code == 1
    assert (record["compared"], record["of"]) == (1, 17)
    [blame] = record["blame"]
    assert blame["layer"] == LAYER
    assert site in blame["sites"]


def _judge(
    name: str, toy: Path, golden: Path, command: Command, tmp_path: Path
) -> tuple[int, dict[str, object]]:
    result = command(
        mm2_test,
        *("single-layer", "--layer", LAYER, "--model", toy, "--golden", golden),
        *(
            "--target",
            f"{PORTS}:{name}",
            "--backend",
            "cpu",
            "--output-dir",
            tmp_path / "run",
            "--json",
            "--quiet",
        ),
    )
    return result.exit_code, json.loads(result.stdout)

"""Mistakes that real ports had, planted in the example ports: each is found and placed, and nothing else.

Of whole ports, in front of the layers or in a cache, each is named too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from bench_logits import Ground
from bench_model_ports import ModelCase
from bench_model_ports import judge as judge_whole
from faults.model_ports import MODEL_MISTAKES, RIGHT_MODELS, ModelPlant

Command = Callable[..., click.testing.Result]

PORTS = Path(__file__).parent / "ports" / "planted.py"
LAYER = 2
MODEL = SyntheticModel(
    hidden_size=128, num_local_experts=16, num_experts_per_tok=4, intermediate_size=64, vocab_size=512
)

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
    *("NormPerHeadWeights", "NormByHead", "FullRotary", "InterleavedRotary", "SlidingWindow"),
    *("AttentionScale", "UnlikeliestExperts", "Bfloat16CorrectionBias", "WeightsNotNormalised"),
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


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """A model smaller than the toy, and its golden."""
    folder = tmp_path_factory.mktemp("ground")
    synthesize(folder / "model", model=MODEL, dtype=torch.float8_e4m3fn, shard_size_bytes=None, seed=0)
    return Ground.make(
        folder / "model", folder, "extract-all", "--seq-len", "48,33", "--certify", name="small"
    )


@pytest.fixture
def judge(ground: Ground, command: Command, tmp_path: Path) -> Any:
    """Judges a layer of a port: exit code and JSON."""

    def run(name: str) -> tuple[int, dict[str, Any]]:
        sides = (
            "--model",
            ground.model,
            "--golden",
            ground.golden,
            "--target",
            f"{PORTS}:{name}",
            "--backend",
            "cpu",
        )
        place = ("--output-dir", tmp_path / "run", "--json", "--quiet")
        result = command(mm2_test, "single-layer", "--layer", LAYER, *sides, *place)
        return result.exit_code, json.loads(result.stdout)

    return run


@pytest.mark.parametrize(("name", "sites"), cases(MISTAKES))
def test_mistake_is_blamed_on_its_site(name: str, sites: list[str], judge: Any) -> None:
    exit_code, record = judge(name)
    assert (exit_code, record["verdict"]) == (1, "fail")
    found = [(blame["layer"], blame["sites"]) for blame in record["blame"]]
    assert found == [(LAYER, [site]) for site in sites]


@pytest.mark.parametrize("name", NO_MISTAKES)
def test_what_is_no_mistake_passes(name: str, judge: Any) -> None:
    exit_code, record = judge(name)
    assert (exit_code, record["verdict"], record["blame"]) == (0, "pass", [])


@pytest.mark.parametrize(("name", "site"), cases(BLACK_BOXES))
def test_black_box_is_found_out_and_the_blame_encloses_the_site(name: str, site: str, judge: Any) -> None:
    exit_code, record = judge(name)
    assert exit_code == 1
    assert (record["compared"], record["of"]) == (1, 17)
    [blame] = record["blame"]
    assert blame["layer"] == LAYER
    assert site in blame["sites"]


# A mistake in front of the layers, and in a cache that mm2 does not read. Slow tests plant the others.
FAST = ("embedding_scaled", "cache_hidden_one_row_off", "own_cache", "cache_fp8_with_scales")


def plants(ports: Sequence[ModelPlant]) -> list[Any]:
    """Return whole ports as parameters, of which most are slow."""
    return [
        pytest.param(port, id=port.name, marks=() if port.name in FAST else pytest.mark.slow)
        for port in ports
    ]


class TestWholePorts:
    # These pass with a warning.
    WARNED = ("cache_fp8_with_scales",)

    @pytest.fixture
    def judge(self, ground: Ground) -> Any:
        """Judges a whole port."""

        def run(plant: ModelPlant) -> ModelCase:
            return judge_whole(plant, ground, backend="cpu", where="small")

        return run

    @pytest.mark.parametrize("plant", plants(MODEL_MISTAKES))
    def test_mistake_is_detected_placed_and_named(self, plant: ModelPlant, judge: Any) -> None:
        case = judge(plant)
        assert (case.is_detected, case.is_placed, case.is_named) == (True, True, True), case

    @pytest.mark.parametrize("plant", plants(RIGHT_MODELS))
    def test_right_port_is_not_flagged(self, plant: ModelPlant, judge: Any) -> None:
        case = judge(plant)
        assert case.verdict in ("pass", "warn"), case
        if plant.name in FAST:
            assert case.verdict == ("warn" if plant.name in self.WARNED else "pass"), case

    def test_names_are_unique(self) -> None:
        names = [plant.name for plant in (*MODEL_MISTAKES, *RIGHT_MODELS)]
        assert len(set(names)) == len(names)

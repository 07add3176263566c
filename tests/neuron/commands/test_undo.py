"""Mistakes undone in real ports: proved by the weights or at a stage, not proved, or not provable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Undo = Callable[..., tuple[int, dict[str, Any]]]

PORTS = Path(__file__).parents[2] / "ports"
PLANTED, UNCOMMON = PORTS / "planted.py", PORTS / "diagnosed.py"
LAYER = 1
SLOW = pytest.mark.slow


@pytest.fixture
def run_undo(on_small: tuple[object, ...], command: Command, tmp_path: Path) -> Callable[..., Any]:
    """Undoes mistakes in layer 1 of a port: `run_undo(TARGET, *MISTAKES)`."""

    def run(target: str, *mistakes: str, as_json: bool = False) -> click.testing.Result:
        options = [word for mistake in mistakes for word in ("--undo", mistake)]
        place = ("--backend", "cpu", "--output-dir", tmp_path / "undone", *(("--json",) if as_json else ()))
        layer = ("single-layer", "--layer", LAYER, *on_small, "--target", target, "--quiet")
        return command(mm2_test, *layer, *place, *options)

    return run


@pytest.fixture
def undo(run_undo: Callable[..., Any]) -> Undo:
    """Undoes mistakes; the exit code and the proof."""

    def run(target: str, *mistakes: str) -> tuple[int, dict[str, Any]]:
        result = run_undo(target, *mistakes, as_json=True)
        record = json.loads(result.stdout)
        return result.exit_code, record.get("proof", record)

    return run


def replaced_sites(proof: dict[str, Any]) -> list[str]:
    return [one["site"] for one in proof["sites"] if one["is_replaced"]]


def rho(proof: dict[str, Any], site: str) -> tuple[float, float]:
    (found,) = (one for one in proof["sites"] if one["site"] == site)
    return found["before"], found["after"]


@pytest.mark.parametrize(
    ("port", "mistake", "site"),
    [
        ("SwappedGateUp", "gate_up_swapped", "moe_delta"),
        pytest.param("SwappedKeyValue", "k_v_swapped", "v_proj", marks=SLOW),
        ("KeyNormDivisor", "k_norm_scaled,factor=0.353553", "k_norm"),
        pytest.param(
            "QueryWithoutScale", "projection_scaled,tensor=q_proj,factor=64.0", "q_proj", marks=SLOW
        ),
        pytest.param("InterleavedRotary", "rope_interleaved", "output", marks=SLOW),
    ],
)
def test_mistake_is_proved_in_the_weights(undo: Undo, port: str, mistake: str, site: str) -> None:
    exit_code, proof = undo(f"{PLANTED}:{port}", mistake)
    assert (exit_code, proof["outcome"], proof["way"]) == (0, "proved", "weights")
    assert (proof["before"], proof["after"]) == ("fail", "pass")
    before, after = rho(proof, site)
    assert after < 1.3 < before
    assert proof["lines"][0] == f"if layer_idx == {LAYER}:"
    assert not any(one["is_replaced"] for one in proof["sites"])


@pytest.mark.parametrize(
    ("port", "mistake", "replaced"),
    [
        ("SoftmaxRouter", "router_softmax", ["router_experts", "router_weights"]),
        pytest.param("GeluExperts", "gelu_activation,approximate=none", ["moe_delta"], marks=SLOW),
        ("NormPerRank", "qk_norm_per_rank,tp_degree=2", ["q_norm", "k_norm"]),
        pytest.param("TiledKeyValueHeads", "kv_repeat_tiled", ["attn_context"], marks=SLOW),
        pytest.param("DefaultTheta", "rope_theta,theta=10000.0", ["q_rope", "k_rope"], marks=SLOW),
    ],
)
def test_mistake_is_proved_at_its_stage(undo: Undo, port: str, mistake: str, replaced: list[str]) -> None:
    exit_code, proof = undo(f"{PLANTED}:{port}", mistake)
    assert (exit_code, proof["outcome"], proof["way"]) == (0, "proved", "stage")
    assert replaced_sites(proof) == replaced
    before, after = rho(proof, "output")
    assert after < 1.3 < before
    assert proof["stage"]["leaves"] < 2 < proof["stage"]["unexplained"]
    assert proof["lines"] == []


@pytest.mark.parametrize(
    ("port", "mistake", "replaced"),
    [
        # The logits come out of the module that chooses by them: what follows from them is not computed anew.
        (
            f"{PLANTED}:QuantisedGate",
            "router_quantised,stored=fp8 by tensor",
            ["router_logits", "router_experts", "router_weights"],
        ),
        # The last stage is proved by its own inputs.
        (f"{UNCOMMON}:ResidualLost", "moe_residual_missing", ["output"]),
        # The port shows attn_residual at the norm's input: the second add takes another tensor.
        (f"{UNCOMMON}:InputLost", "attention_residual_missing", ["attn_residual", "output"]),
    ],
)
def test_what_follows_is_replaced_with_the_site(
    undo: Undo, port: str, mistake: str, replaced: list[str]
) -> None:
    exit_code, proof = undo(port, mistake)
    assert (exit_code, proof["outcome"], proof["way"]) == (0, "proved", "stage")
    assert replaced_sites(proof) == replaced


@pytest.mark.parametrize(
    ("port", "mistake"),
    [
        # In the weights.
        ("SwappedGateUp", "k_v_swapped"),
        pytest.param("SwappedGateUp", "moe_delta_scaled,factor=2.0", marks=SLOW),
        pytest.param("SwappedGateUp", "expert_ids_shifted,offset=1", marks=SLOW),
        # At the stage that is wrong, and at another.
        ("SwappedGateUp", "gelu_activation,approximate=none"),
        pytest.param("SoftmaxRouter", "router_weights_uniform", marks=SLOW),
        ("SoftmaxRouter", "router_bias_missing"),
        pytest.param("NormPerRank", "qk_norm_missing", marks=SLOW),
        pytest.param("NormPerRank", "attention_residual_missing", marks=SLOW),
    ],
)
def test_wrong_name_is_not_proved(undo: Undo, port: str, mistake: str) -> None:
    exit_code, proof = undo(f"{PLANTED}:{port}", mistake)
    assert (exit_code, proof["outcome"]) == (1, "not proved")
    assert proof["reason"]


@pytest.mark.parametrize(
    ("mistake", "way", "rest"),
    [
        ("gate_up_swapped", "weights", "qk_norm_per_rank,tp_degree=2"),
        ("qk_norm_per_rank,tp_degree=2", "stage", "gate_up_swapped"),
    ],
)
def test_one_of_two_mistakes_is_not_proved_and_the_other_is_named(
    undo: Undo, mistake: str, way: str, rest: str
) -> None:
    exit_code, proof = undo(f"{PLANTED}:NormPerRankAndSwappedGateUp", mistake)
    assert (exit_code, proof["outcome"], proof["way"]) == (1, "not proved", way)
    assert proof["remaining"][0] == rest


def test_two_mistakes_are_undone_together(undo: Undo) -> None:
    both = ("qk_norm_per_rank,tp_degree=2", "gate_up_swapped")
    exit_code, proof = undo(f"{PLANTED}:NormPerRankAndSwappedGateUp", *both)
    assert (exit_code, proof["outcome"], proof["way"]) == (0, "proved", "weights and stage")


@pytest.mark.parametrize(
    ("target", "mistake", "reason"),
    [
        (f"{PLANTED}:BlackBoxTiledKeyValueHeads", "kv_repeat_tiled", "does not show attn_context"),
        (
            f"{UNCOMMON}:CopyShown",
            "gelu_activation,approximate=none",
            "goes on with other values than it shows at moe_delta",
        ),
        ("reference", "gate_up_swapped", "does not fail as it is"),
    ],
)
def test_what_cannot_be_proved_says_why(undo: Undo, target: str, mistake: str, reason: str) -> None:
    exit_code, proof = undo(target, mistake)
    assert (exit_code, proof["outcome"]) == (3, "not provable")
    assert reason in proof["reason"]
    assert target == "reference" or "`sites`" in proof["next_step"]


def test_black_box_is_proved_by_its_weights_alone(undo: Undo) -> None:
    assert undo(f"{PLANTED}:BlackBoxSwappedGateUp", "gate_up_swapped")[0] == 0


def test_port_without_a_conversion_gets_a_whole_one(undo: Undo) -> None:
    exit_code, proof = undo(f"{UNCOMMON}:Unconverted", "gate_up_swapped")
    assert exit_code == 0
    assert proof["lines"][0] == "def convert_state_dict(self, tensors, config, layer_idx):"
    assert proof["lines"][-1] == "    return tensors"


def test_wrong_usage_is_refused(undo: Undo, command: Command, small_fp8: Path) -> None:
    exit_code, record = undo(f"{PLANTED}:DefaultTheta", "rope_theta,base=10000.0")
    assert exit_code == 2
    assert "expected theta, found base=10000.0" in record["error"]
    layer = ("single-layer", "--layer", 1, "--model", small_fp8)
    result = command(mm2_test, *layer, "--undo", "gate_up_swapped")
    assert (result.exit_code, "--undo needs a golden" in result.output) == (2, True)


def test_text_tells_the_outcome_and_the_lines(run_undo: Callable[..., Any]) -> None:
    result = run_undo(f"{PLANTED}:SwappedGateUp", "gate_up_swapped")
    assert result.exit_code == 0
    assert "Layer 1 without gate_up_swapped: proved" in result.stdout
    assert "Lines that undo it, at the beginning of convert_state_dict:" in result.stdout
    assert "tensors[gate], tensors[up] = tensors[up], tensors[gate]" in result.stdout

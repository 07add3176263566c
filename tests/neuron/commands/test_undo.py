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


@pytest.fixture
def undo(small_fp8: Path, small_golden: Path, command: Command, tmp_path: Path) -> Undo:
    """Undoes mistakes in layer 1 of a port: `undo(TARGET, *MISTAKES)` gives the exit code and the proof."""

    def run(target: str, *mistakes: str, backend: str = "cpu") -> tuple[int, dict[str, Any]]:
        arguments = ["single-layer", "--layer", LAYER, "--model", small_fp8, "--golden", small_golden]
        arguments += ["--target", target, "--backend", backend, "--output-dir", tmp_path / "undone"]
        options = [word for mistake in mistakes for word in ("--undo", mistake)]
        result = command(mm2_test, *arguments, *options, "--json", "--quiet")
        record = json.loads(result.stdout)
        return result.exit_code, record.get("proof", record)

    return run


def rho(proof: dict[str, Any], site: str) -> tuple[float, float]:
    (found,) = (one for one in proof["sites"] if one["site"] == site)
    return found["before"], found["after"]


@pytest.mark.parametrize(
    ("port", "mistake", "site"),
    [
        ("SwappedGateUp", "gate_up_swapped", "moe_delta"),
        pytest.param("SwappedKeyValue", "k_v_swapped", "v_proj", marks=pytest.mark.slow),
        ("KeyNormDivisor", "k_norm_scaled,factor=0.353553", "k_norm"),
        pytest.param(
            "QueryWithoutScale",
            "projection_scaled,tensor=q_proj,factor=64.0",
            "q_proj",
            marks=pytest.mark.slow,
        ),
        pytest.param("InterleavedRotary", "rope_interleaved", "output", marks=pytest.mark.slow),
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
        pytest.param(
            "GeluExperts", "gelu_activation,approximate=none", ["moe_delta"], marks=pytest.mark.slow
        ),
        ("NormPerRank", "qk_norm_per_rank,tp_degree=2", ["q_norm", "k_norm"]),
        pytest.param("TiledKeyValueHeads", "kv_repeat_tiled", ["attn_context"], marks=pytest.mark.slow),
        pytest.param(
            "DefaultTheta", "rope_theta,theta=10000.0", ["q_rope", "k_rope"], marks=pytest.mark.slow
        ),
    ],
)
def test_mistake_is_proved_at_its_stage(undo: Undo, port: str, mistake: str, replaced: list[str]) -> None:
    exit_code, proof = undo(f"{PLANTED}:{port}", mistake)
    assert (exit_code, proof["outcome"], proof["way"]) == (0, "proved", "stage")
    assert [one["site"] for one in proof["sites"] if one["is_replaced"]] == replaced
    before, after = rho(proof, "output")
    assert after < 1.3 < before
    assert proof["stage"]["leaves"] < 2 < proof["stage"]["unexplained"]
    assert proof["lines"] == []


def test_outputs_of_one_module_are_replaced_together(undo: Undo) -> None:
    # The logits come out of the module that chooses by them: what follows from them is not computed anew.
    exit_code, proof = undo(f"{PLANTED}:QuantisedGate", "router_quantised,stored=fp8 by tensor")
    assert (exit_code, proof["outcome"], proof["way"]) == (0, "proved", "stage")
    replaced = [one["site"] for one in proof["sites"] if one["is_replaced"]]
    assert replaced == ["router_logits", "router_experts", "router_weights"]


def test_mistake_in_the_last_stage_is_proved_by_its_own_inputs(undo: Undo) -> None:
    exit_code, proof = undo(f"{UNCOMMON}:ResidualLost", "moe_residual_missing")
    assert (exit_code, proof["outcome"], proof["way"]) == (0, "proved", "stage")
    assert [one["site"] for one in proof["sites"] if one["is_replaced"]] == ["output"]


def test_sum_that_the_port_shows_elsewhere_is_replaced_with_what_follows(undo: Undo) -> None:
    # The port shows attn_residual at the norm's input: the second add takes another tensor.
    exit_code, proof = undo(f"{UNCOMMON}:InputLost", "attention_residual_missing")
    assert (exit_code, proof["outcome"], proof["way"]) == (0, "proved", "stage")
    assert [one["site"] for one in proof["sites"] if one["is_replaced"]] == ["attn_residual", "output"]


@pytest.mark.parametrize(
    ("port", "mistake"),
    [
        # In the weights.
        ("SwappedGateUp", "k_v_swapped"),
        pytest.param("SwappedGateUp", "moe_delta_scaled,factor=2.0", marks=pytest.mark.slow),
        pytest.param("SwappedGateUp", "expert_ids_shifted,offset=1", marks=pytest.mark.slow),
        # At the stage that is wrong, and at another.
        ("SwappedGateUp", "gelu_activation,approximate=none"),
        pytest.param("SoftmaxRouter", "router_weights_uniform", marks=pytest.mark.slow),
        ("SoftmaxRouter", "router_bias_missing"),
        pytest.param("NormPerRank", "qk_norm_missing", marks=pytest.mark.slow),
        pytest.param("NormPerRank", "attention_residual_missing", marks=pytest.mark.slow),
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


def test_black_box_is_proved_by_its_weights_alone(undo: Undo) -> None:
    assert undo(f"{PLANTED}:BlackBoxSwappedGateUp", "gate_up_swapped")[0] == 0
    exit_code, proof = undo(f"{PLANTED}:BlackBoxTiledKeyValueHeads", "kv_repeat_tiled")
    assert (exit_code, proof["outcome"]) == (3, "not provable")
    assert "does not show attn_context" in proof["reason"]
    assert "`sites`" in proof["next_step"]


def test_site_that_the_port_does_not_compute_with_proves_nothing(undo: Undo) -> None:
    exit_code, proof = undo(f"{UNCOMMON}:CopyShown", "gelu_activation,approximate=none")
    assert (exit_code, proof["outcome"]) == (3, "not provable")
    assert "goes on with other values than it shows at moe_delta" in proof["reason"]


def test_right_port_has_nothing_to_prove(undo: Undo) -> None:
    exit_code, proof = undo("reference", "gate_up_swapped")
    assert (exit_code, proof["outcome"]) == (3, "not provable")
    assert "does not fail as it is" in proof["reason"]


def test_port_without_a_conversion_gets_a_whole_one(undo: Undo) -> None:
    exit_code, proof = undo(f"{UNCOMMON}:Unconverted", "gate_up_swapped")
    assert exit_code == 0
    assert proof["lines"][0] == "def convert_state_dict(self, tensors, config, layer_idx):"
    assert proof["lines"][-1] == "    return tensors"


def test_parameters_of_another_kind_are_refused(undo: Undo) -> None:
    exit_code, record = undo(f"{PLANTED}:DefaultTheta", "rope_theta,base=10000.0")
    assert exit_code == 2
    assert "expected theta, found base=10000.0" in record["error"]


def test_golden_is_needed(small_fp8: Path, command: Command) -> None:
    result = command(
        mm2_test, "single-layer", "--layer", 1, "--model", small_fp8, "--undo", "gate_up_swapped"
    )
    assert result.exit_code == 2
    assert "--undo needs a golden" in result.output


def test_text_tells_the_outcome_and_the_lines(
    small_fp8: Path, small_golden: Path, command: Command, tmp_path: Path
) -> None:
    paths = ("--model", small_fp8, "--golden", small_golden, "--output-dir", tmp_path / "undone")
    target = ("--target", f"{PLANTED}:SwappedGateUp", "--backend", "cpu", "--undo", "gate_up_swapped")
    result = command(mm2_test, "single-layer", "--layer", LAYER, *paths, *target, "--quiet")
    assert result.exit_code == 0
    assert "Layer 1 without gate_up_swapped: proved" in result.stdout
    assert "Lines that undo it, at the beginning of convert_state_dict:" in result.stdout
    assert "tensors[gate], tensors[up] = tensors[up], tensors[gate]" in result.stdout

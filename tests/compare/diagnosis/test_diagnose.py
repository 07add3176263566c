"""Mistakes planted in real ports are named, seen from outside or not; what is no mistake, or an unknown one, is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from compare.diagnosis.cli import main as mm2_diagnose
from gpu_reference.cli import main as mm2_gpu
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Diagnose = Callable[..., tuple[int, dict[str, Any]]]

PORTS = Path(__file__).parents[2] / "ports"
LAYER = 2
# Further variants of a claim that a fast test makes.
SLOW = pytest.mark.slow

# One of the norms, of attention, of the router and of the experts; the slow tests name the others.
OF_THE_EXAMPLE_PORT = {
    "NormPerRank": ("qk_norm_per_rank", {"tp_degree": 2}),
    "DefaultTheta": ("rope_theta", {"theta": pytest.approx(1e4, rel=1e-2)}),
    "Bfloat16CorrectionBias": ("router_bias_low_precision", {}),
    "LocalExpertsOnly": ("experts_local_only", {"ep_degree": 4, "rank": 0}),
}
MORE_OF_THE_EXAMPLE_PORT = {
    "NormByHead": ("qk_norm_by_head_averaged", {}),
    "KeyNormDivisor": ("k_norm_scaled", {"factor": pytest.approx(8**-0.5, rel=1e-3)}),
    "SlidingWindow": ("sliding_window", {"window": 24}),
    "QueryWithoutScale": ("projection_scaled", {"tensor": "q_proj", "factor": 64.0}),
    "NormMiscompiled": ("post_norm_slice_twice", {"parts": 3, "part": 1}),
    "QuantisedGate": ("router_quantised", {"stored": "fp8 by tensor"}),
    "NormPerHeadWeights": ("qk_norm_weight_averaged", {}),
    "FullRotary": ("rope_width", {"rotary_dim": 64}),
    "AttentionScale": ("attention_scale", {"factor": pytest.approx(0.9, rel=1e-3)}),
    "OutputProjectionNeverLoaded": ("o_proj_zero", {}),
    "BiasedWeights": ("router_bias_in_weights", {}),
    "UpPlusOne": ("up_plus_one", {}),
}
# Names that fit one mistake alone.
NAMED_ALONE = {
    "UpClampedAlone": ("up_clamped", {"limit": pytest.approx(1.0, rel=0.02), "side": "above"}),
    "UpClampedOnBothSides": ("up_clamped", {"limit": pytest.approx(0.7, rel=0.02), "side": "both"}),
    "ExchangedExperts": ("experts_exchanged", {"first": 5, "second": 6}),
    "KeyNormOfQuery": ("k_norm_weight_of_q_norm", {"heads": "first"}),
    "ContextNotTransposed": ("attention_context_not_transposed", {}),
    "PositionsModuloTwenty": ("rope_positions_modulo", {"modulo": 20}),
}
BLACK_BOXES = {
    "BlackBoxSwappedGateUp": ("gate_up_swapped", {}),
    "BlackBoxTiledKeyValueHeads": ("kv_repeat_tiled", {}),
    "BlackBoxNoCorrectionBias": ("router_bias_missing", {}),
}


@pytest.fixture(scope="module")
def float32_golden(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's golden in float32, which has no noise."""
    directory = tmp_path_factory.mktemp("golden") / "float32"
    tokens = ("--seq-len", "48,33", "--noise-floor", "off", "--dtype", "float32")
    arguments = ["extract-all", "--model", str(toy), *tokens, "--output-dir", str(directory), "--quiet"]
    result = click.testing.CliRunner().invoke(mm2_gpu, arguments)
    assert result.exit_code == 0, result.output
    return directory


@pytest.fixture
def diagnose(toy: Path, golden: Path, command: Command, tmp_path: Path) -> Diagnose:
    """Runs a port on the golden's input of layer 2, or of several `layers`, and diagnoses it."""

    right = golden

    def run(
        name: str,
        *options: object,
        ports: str = "planted.py",
        decode: int = 0,
        layers: str | None = None,
        golden: Path = right,
    ) -> tuple[int, Any]:
        target = name if name == "builtin" else f"{PORTS / ports}:{name}"
        chosen = ["single-layer", "--layer", LAYER] if layers is None else ["sweep", "--layers", layers]
        arguments = [*chosen, "--model", toy, "--golden", golden, "--target", target]
        if golden is not right:
            arguments += ["--dtype", "float32"]
        if decode:
            arguments += ["--decode", decode]
        command(mm2_test, *arguments, "--backend", "cpu", "--output-dir", tmp_path / "run", "--quiet")
        paths = ("--model", toy, "--golden", golden, "--run", tmp_path / "run")
        result = command(mm2_diagnose, *paths, *options, "--json", "--quiet")
        return result.exit_code, json.loads(result.stdout)

    return run


@pytest.mark.parametrize(
    "name",
    [
        *OF_THE_EXAMPLE_PORT,
        "BlackBoxSwappedGateUp",
        *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_OF_THE_EXAMPLE_PORT),
        *(pytest.param(name, marks=pytest.mark.slow) for name in list(BLACK_BOXES)[1:]),
    ],
)
def test_mistake_is_named(name: str, diagnose: Diagnose) -> None:
    expected = {**OF_THE_EXAMPLE_PORT, **MORE_OF_THE_EXAMPLE_PORT, **BLACK_BOXES}[name]
    exit_code, record = diagnose(name)
    first = record["diagnosis"][0]
    assert exit_code == 1
    assert (first["layer"], first["mistake"], first["parameters"]) == (LAYER, *expected)
    assert first["leaves"] < 1.5
    assert first["explains"] > 0.9
    assert first["amplitude"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("UpClampedAlone", "ExchangedExperts") else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMED_ALONE
    ],
)
def test_mistake_is_named_and_no_other(name: str, diagnose: Diagnose) -> None:
    exit_code, record = diagnose(name)
    assert exit_code == 1
    assert [(one["mistake"], one["parameters"]) for one in record["diagnosis"]] == [NAMED_ALONE[name]]


@pytest.mark.slow
def test_two_mistakes_at_once_are_named_together(diagnose: Diagnose) -> None:
    _, record = diagnose("BlackBoxPair", ports="diagnosed.py")
    assert record["diagnosis"][0]["mistake"] == "qk_norm_per_rank + gate_up_swapped"
    assert record["diagnosis"][0]["parameters"] == {"qk_norm_per_rank.tp_degree": 2}


@pytest.mark.slow
def test_two_mistakes_of_attention_are_both_named(diagnose: Diagnose) -> None:
    _, record = diagnose("KeysAndTheta", ports="diagnosed.py")
    named = {one["mistake"]: one["parameters"] for one in record["diagnosis"]}
    assert named == {"k_v_swapped": {}, "rope_theta": {"theta": pytest.approx(1e4, rel=1e-2)}}


@pytest.mark.slow
def test_pair_that_explained_a_layer_is_tried_first_on_the_next(diagnose: Diagnose) -> None:
    _, record = diagnose("BlackBoxPair", ports="diagnosed.py", layers="1:3")
    assert [(one["layer"], one["mistake"]) for one in record["diagnosis"]] == [
        (1, "qk_norm_per_rank + gate_up_swapped"),
        (2, "qk_norm_per_rank + gate_up_swapped"),
    ]
    first, second = (layer["num_hypotheses"] for layer in record["layers"])
    assert (first > 250, second) == (True, 1)


def test_mistake_that_alone_is_tried_needs_no_proof_in_later_layers(diagnose: Diagnose) -> None:
    _, record = diagnose("AttentionScale", "--mistake", "attention_scale", layers="1:3")
    assert [(one["layer"], one["mistake"]) for one in record["diagnosis"]] == [
        (1, "attention_scale"),
        (2, "attention_scale"),
    ]


def test_mistake_of_decoded_rows_alone_says_so(diagnose: Diagnose) -> None:
    _, record = diagnose("SwappedWhereDecoded", ports="diagnosed.py", decode=12)
    first = record["diagnosis"][0]
    assert (first["mistake"], first["parameters"]) == ("gate_up_swapped", {"rows": "decode"})


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("LowPrecisionSoftmax", "attention_softmax_low_precision"),
        pytest.param("LowPrecisionNorm", "qk_norm_low_precision", marks=SLOW),
    ],
)
def test_mistake_below_the_noise_is_named_where_its_layer_is_asked_for(
    name: str, mistake: str, diagnose: Diagnose
) -> None:
    exit_code, record = diagnose(name, "--layer", LAYER, "--mistake", mistake, ports="diagnosed.py")
    assert exit_code == 1
    assert [finding["mistake"] for finding in record["diagnosis"]] == [mistake]
    assert record["diagnosis"][0]["z"] > 8


def test_rounding_that_noise_changes_is_named_by_the_part_that_can_be_foretold(diagnose: Diagnose) -> None:
    mistakes = ("fp8_activations", "moe_delta_scaled", "gelu_activation", "router_low_precision")
    options = [part for mistake in mistakes for part in ("--mistake", mistake)]
    _, record = diagnose("BlackBoxOfFp8Activations", "--layer", LAYER, *options, ports="diagnosed.py")
    (found,) = record["diagnosis"]
    assert found["mistake"] == "fp8_activations"
    assert 0.5 < found["amplitude"] < 1.1
    assert found["z"] > 8


def test_parameter_far_from_all_candidates_is_found_before_what_only_resembles_it(diagnose: Diagnose) -> None:
    mistakes = ("norm_eps", "post_norm_slice_twice", "gelu_activation", "moe_delta_scaled")
    options = [part for mistake in mistakes for part in ("--mistake", mistake)]
    _, record = diagnose("BlackBoxOfSmallExperts", "--layer", LAYER, *options, ports="diagnosed.py")
    assert [finding["mistake"] for finding in record["diagnosis"]] == ["moe_delta_scaled"]
    assert record["diagnosis"][0]["parameters"] == {"factor": pytest.approx(0.97, abs=0.003)}


def test_what_only_resembles_a_mistake_is_not_named(diagnose: Diagnose) -> None:
    mistakes = ("norm_eps", "post_norm_slice_twice")
    options = [part for mistake in mistakes for part in ("--mistake", mistake)]
    _, record = diagnose("BlackBoxOfSmallExperts", "--layer", LAYER, *options, ports="diagnosed.py")
    assert record["diagnosis"] == []


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("RoundedGate", "router_gate_low_precision"), ("LowPrecisionGate", "router_low_precision")],
)
def test_rounded_gate_is_told_from_a_rounded_product(
    name: str, mistake: str, diagnose: Diagnose, float32_golden: Path
) -> None:
    # In BF16 both are below the noise of the router's input.
    _, record = diagnose(name, ports="diagnosed.py", golden=float32_golden)
    assert [finding["mistake"] for finding in record["diagnosis"]] == [mistake]


@pytest.mark.parametrize(
    "name",
    ["NormByHead", *(pytest.param(name, marks=SLOW) for name in ("NormPerHeadWeights", "NormPerRank"))],
)
def test_norms_by_head_are_told_apart(name: str, diagnose: Diagnose) -> None:
    mistakes = (
        "qk_norm_weight_averaged",
        "qk_norm_by_head_averaged",
        "qk_norm_per_rank",
        "qk_norm_first_slice",
    )
    options = [part for one in mistakes for part in ("--mistake", one)]
    _, record = diagnose(name, *options)
    expected = {**OF_THE_EXAMPLE_PORT, **MORE_OF_THE_EXAMPLE_PORT}[name]
    first = record["diagnosis"][0]
    assert (first["mistake"], first["parameters"]) == expected


@pytest.mark.parametrize(
    ("name", "num_parts"), [("EachHeadNormedAlone", 8), pytest.param("NormPerRank", 2, marks=SLOW)]
)
def test_norm_of_each_head_alone_is_told_from_that_of_a_ranks_part(
    name: str, num_parts: int, diagnose: Diagnose
) -> None:
    ports = "diagnosed.py" if num_parts == 8 else "planted.py"
    _, record = diagnose(name, "--mistake", "qk_norm_per_rank", ports=ports)
    (found,) = record["diagnosis"]
    assert found["parameters"] == {"tp_degree": num_parts}
    assert "of one rank's heads without an all-reduce, or of each head alone" in found["what"]
    assert found["what"].endswith("each head is normed alone.") == (num_parts == 8)
    assert "on one rank, whether they run before the heads are split" in found["look_at"]


@pytest.mark.slow
def test_mistake_that_nobody_knows_is_not_named(diagnose: Diagnose) -> None:
    exit_code, record = diagnose("BlackBoxOfRandomRows", ports="diagnosed.py")
    assert (exit_code, record["diagnosis"]) == (1, [])
    [layer] = record["layers"]
    assert layer["unexplained"] > 50
    assert layer["nearest"]


@pytest.mark.slow
def test_no_mistake_is_named_of_a_clean_port(diagnose: Diagnose) -> None:
    exit_code, record = diagnose("builtin", "--layer", LAYER)
    assert (exit_code, record["diagnosis"], record["is_failed"]) == (0, [], False)
    assert record["layers"][0]["num_hypotheses"] > 250


def test_faint_mistake_is_not_named_of_a_clean_port(diagnose: Diagnose) -> None:
    mistakes = (
        "attention_softmax_low_precision",
        "qk_norm_low_precision",
        "norm_eps",
        "router_low_precision",
    )
    options = [part for mistake in mistakes for part in ("--mistake", mistake)]
    exit_code, record = diagnose("builtin", "--layer", LAYER, *options)
    assert (exit_code, record["diagnosis"]) == (0, [])


def test_mistake_that_is_not_in_what_is_tried_is_not_named(diagnose: Diagnose) -> None:
    options = [part for mistake in ("o_proj_zero", "k_v_swapped") for part in ("--mistake", mistake)]
    exit_code, record = diagnose("BlackBoxOfRandomRows", *options, ports="diagnosed.py")
    assert (exit_code, record["diagnosis"]) == (1, [])


def test_nothing_is_tried_where_nothing_differs(diagnose: Diagnose) -> None:
    exit_code, record = diagnose("builtin")
    assert (exit_code, record["diagnosis"], record["layers"]) == (0, [], [])


def test_nan_is_left_out_and_noted(diagnose: Diagnose) -> None:
    exit_code, record = diagnose("NanInOneRow", "--mistake", "gate_up_swapped")
    assert (exit_code, record["diagnosis"]) == (1, [])
    assert "NaN or Inf" in record["layers"][0]["notes"][0]


def test_nothing_is_tried_where_no_token_is_a_number(diagnose: Diagnose) -> None:
    exit_code, record = diagnose("BlackBoxOfNan", ports="diagnosed.py")
    [layer] = record["layers"]
    assert (exit_code, record["diagnosis"], layer["num_hypotheses"]) == (1, [], 0)
    assert "NaN or Inf" in layer["notes"][0]


def test_mistake_that_makes_the_noise_itself_grow_is_named_alone(diagnose: Diagnose) -> None:
    _, record = diagnose("BlackBoxWithoutResidual", ports="diagnosed.py")
    assert record["diagnosis"][0]["mistake"] == "attention_residual_missing"
    assert record["diagnosis"][0]["leaves"] < 0.01 * record["layers"][0]["unexplained"]

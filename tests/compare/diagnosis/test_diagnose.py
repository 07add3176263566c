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

Command = Callable[..., click.testing.Result]
Diagnose = Callable[..., tuple[int, dict[str, Any]]]

PORTS = [Path(__file__).parents[2] / "ports" / name for name in ("planted.py", "diagnosed.py")]
LAYER = 2

# One of the norms, of attention, of the router and of the experts; the slow tests name the others.
FAST = {
    "NormPerRank": ("qk_norm_per_rank", {"tp_degree": 2}),
    "DefaultTheta": ("rope_theta", {"theta": pytest.approx(1e4, rel=1e-2)}),
    "Bfloat16CorrectionBias": ("router_bias_low_precision", {}),
    "BlackBoxSwappedGateUp": ("gate_up_swapped", {}),
}
SLOW = {
    "LocalExpertsOnly": ("experts_local_only", {"ep_degree": 4, "rank": 0}),
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
    "BlackBoxTiledKeyValueHeads": ("kv_repeat_tiled", {}),
    "BlackBoxNoCorrectionBias": ("router_bias_missing", {}),
}
# Names that fit one mistake alone.
NAMED_ALONE = {
    "UpClampedAlone": ("up_clamped", {"limit": pytest.approx(1.0, rel=0.02), "side": "above"}),
    "ExchangedExperts": ("experts_exchanged", {"first": 5, "second": 6}),
}
SLOW_NAMED_ALONE = {
    "UpClampedOnBothSides": ("up_clamped", {"limit": pytest.approx(0.7, rel=0.02), "side": "both"}),
    "KeyNormOfQuery": ("k_norm_weight_of_q_norm", {"heads": "first"}),
    "ContextNotTransposed": ("attention_context_not_transposed", {}),
    "PositionsModuloTwenty": ("rope_positions_modulo", {"modulo": 20}),
}
NORMS = ("qk_norm_weight_averaged", "qk_norm_by_head_averaged", "qk_norm_per_rank", "qk_norm_first_slice")
FAINT = ("qk_norm_low_precision", "norm_eps", "router_low_precision")
SOFTMAX = "attention_softmax_low_precision"
GATES = ("router_gate_low_precision", "router_low_precision")
ROUNDED = ("fp8_activations", "moe_delta_scaled", "gelu_activation")
RESEMBLING = ("norm_eps", "post_norm_slice_twice")
SMALL = {"moe_delta_scaled": {"factor": pytest.approx(0.97, abs=0.003)}}
slow = pytest.mark.slow


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
def diagnose(toy: Path, golden: Path, command: Command, run_port: Callable[..., Path]) -> Diagnose:
    """Runs a port on the golden's input of layer 2, or of several `layers`, and diagnoses it by what is `tried`."""
    right = golden

    def run(
        name: str,
        *options: object,
        tried: tuple[str, ...] = (),
        decode: int = 0,
        layers: str | None = None,
        golden: Path = right,
    ) -> tuple[int, Any]:
        file = next((file.name for file in PORTS if f"class {name}(" in file.read_text()), None)
        chosen = ("single-layer", "--layer", LAYER) if layers is None else ("sweep", "--layers", layers)
        run_options = [*chosen[1:], *(("--decode", decode) if decode else ())]
        if golden is not right:
            run_options += ["--golden", golden, "--dtype", "float32"]
        target = run_port(chosen[0], name if file is None else f"{file}:{name}", *run_options)
        mistakes = [word for mistake in tried for word in ("--mistake", mistake)]
        paths = ("--model", toy, "--golden", golden, "--run", target)
        result = command(mm2_diagnose, *paths, *mistakes, *options, "--json", "--quiet")
        return result.exit_code, json.loads(result.stdout)

    return run


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=slow) for name in SLOW)])
def test_mistake_is_named(name: str, diagnose: Diagnose) -> None:
    exit_code, record = diagnose(name)
    first = record["diagnosis"][0]
    assert exit_code == 1
    assert (first["layer"], first["mistake"], first["parameters"]) == (LAYER, *{**FAST, **SLOW}[name])
    assert first["leaves"] < 1.5
    assert first["explains"] > 0.9
    assert first["amplitude"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    "name", [*NAMED_ALONE, *(pytest.param(name, marks=slow) for name in SLOW_NAMED_ALONE)]
)
def test_mistake_is_named_and_no_other(name: str, diagnose: Diagnose) -> None:
    exit_code, record = diagnose(name)
    assert exit_code == 1
    named = [(one["mistake"], one["parameters"]) for one in record["diagnosis"]]
    assert named == [{**NAMED_ALONE, **SLOW_NAMED_ALONE}[name]]


@pytest.mark.parametrize(
    ("name", "tried", "named"),
    [
        ("NormByHead", NORMS, {"qk_norm_by_head_averaged": {}}),
        pytest.param("NormPerHeadWeights", NORMS, {"qk_norm_weight_averaged": {}}, marks=slow),
        pytest.param("NormPerRank", NORMS, {"qk_norm_per_rank": {"tp_degree": 2}}, marks=slow),
        ("EachHeadNormedAlone", NORMS[2:], {"qk_norm_per_rank": {"tp_degree": 8}}),
        # Far from all candidates; without its own name, it has none of those that it resembles.
        ("BlackBoxOfSmallExperts", (*RESEMBLING, "moe_delta_scaled"), SMALL),
        ("BlackBoxOfSmallExperts", RESEMBLING, {}),
        ("BlackBoxOfRandomRows", ("o_proj_zero", "k_v_swapped"), {}),
        # Below the noise.
        ("LowPrecisionNorm", FAINT[:1], {"qk_norm_low_precision": {}}),
        pytest.param("LowPrecisionSoftmax", (SOFTMAX,), {SOFTMAX: {}}, marks=slow),
        ("builtin", FAINT, {}),
    ],
)
def test_mistake_is_named_only_if_it_is_the_cause(
    name: str, tried: tuple[str, ...], named: dict[str, Any], diagnose: Diagnose
) -> None:
    exit_code, record = diagnose(name, "--layer", LAYER, tried=tried)
    assert exit_code == (0 if name == "builtin" else 1)
    assert {one["mistake"]: one["parameters"] for one in record["diagnosis"]} == named
    assert all(one["z"] > 8 for one in record["diagnosis"])


def test_rounding_that_noise_changes_is_named_by_the_part_that_can_be_foretold(diagnose: Diagnose) -> None:
    _, record = diagnose("BlackBoxOfFp8Activations", "--layer", LAYER, tried=ROUNDED)
    (found,) = record["diagnosis"]
    assert found["mistake"] == "fp8_activations"
    assert 0.5 < found["amplitude"] < 1.1
    assert found["z"] > 8


@pytest.mark.parametrize(("name", "mistake"), [("RoundedGate", GATES[0]), ("LowPrecisionGate", GATES[1])])
def test_rounded_gate_is_told_from_a_rounded_product(
    name: str, mistake: str, diagnose: Diagnose, float32_golden: Path
) -> None:
    # In BF16 both are below the noise of the router's input.
    _, record = diagnose(name, golden=float32_golden, tried=GATES)
    assert [finding["mistake"] for finding in record["diagnosis"]] == [mistake]


def test_mistake_of_decoded_rows_alone_says_so(diagnose: Diagnose) -> None:
    _, record = diagnose("SwappedWhereDecoded", decode=12, tried=("gate_up_swapped", "gelu_activation"))
    first = record["diagnosis"][0]
    assert (first["mistake"], first["parameters"]) == ("gate_up_swapped", {"rows": "decode"})


def test_mistake_that_makes_the_noise_itself_grow_is_named_alone(diagnose: Diagnose) -> None:
    tried = ("attention_residual_missing", "attention_delta_scaled", "moe_delta_scaled", "norm_eps")
    _, record = diagnose("BlackBoxWithoutResidual", tried=tried)
    (found,) = record["diagnosis"]
    assert found["mistake"] == "attention_residual_missing"
    assert found["leaves"] < 0.01 * record["layers"][0]["unexplained"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("BlackBoxPair", {"qk_norm_per_rank + gate_up_swapped": {"qk_norm_per_rank.tp_degree": 2}}),
        ("KeysAndTheta", {"k_v_swapped": {}, "rope_theta": {"theta": pytest.approx(1e4, rel=1e-2)}}),
    ],
)
def test_two_mistakes_at_once_are_both_named(name: str, named: dict[str, Any], diagnose: Diagnose) -> None:
    _, record = diagnose(name)
    found = {one["mistake"]: one["parameters"] for one in record["diagnosis"]}
    # Together they are the first of what is named, and apart all of it.
    assert named in (found, dict(list(found.items())[:1]))


@pytest.mark.slow
def test_pair_that_explained_a_layer_is_tried_first_on_the_next(diagnose: Diagnose) -> None:
    _, record = diagnose("BlackBoxPair", layers="1:3")
    pair = "qk_norm_per_rank + gate_up_swapped"
    assert [(one["layer"], one["mistake"]) for one in record["diagnosis"]] == [(1, pair), (2, pair)]
    first, second = (layer["num_hypotheses"] for layer in record["layers"])
    assert (first > 250, second) == (True, 1)


@pytest.mark.slow
def test_mistake_that_nobody_knows_is_not_named(diagnose: Diagnose) -> None:
    exit_code, record = diagnose("BlackBoxOfRandomRows")
    assert (exit_code, record["diagnosis"]) == (1, [])
    [layer] = record["layers"]
    assert layer["unexplained"] > 50
    assert layer["nearest"]


@pytest.mark.slow
def test_no_mistake_is_named_of_a_clean_port(diagnose: Diagnose) -> None:
    exit_code, record = diagnose("builtin", "--layer", LAYER)
    assert (exit_code, record["diagnosis"], record["is_failed"]) == (0, [], False)
    assert record["layers"][0]["num_hypotheses"] > 250


def test_nothing_is_tried_where_nothing_differs(diagnose: Diagnose) -> None:
    exit_code, record = diagnose("builtin")
    assert (exit_code, record["diagnosis"], record["layers"]) == (0, [], [])


@pytest.mark.parametrize(("name", "is_tried"), [("NanInOneRow", True), ("BlackBoxOfNan", False)])
def test_nan_is_left_out_and_noted(name: str, is_tried: bool, diagnose: Diagnose) -> None:
    exit_code, record = diagnose(name, tried=("gate_up_swapped",))
    [layer] = record["layers"]
    assert (exit_code, record["diagnosis"], layer["num_hypotheses"] > 0) == (1, [], is_tried)
    assert "NaN or Inf" in layer["notes"][0]

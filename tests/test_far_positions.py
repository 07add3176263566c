"""The default golden's far rows find ports that are right near position 0 alone; right ports pass on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from compare.diagnosis.cli import main as mm2_diagnose
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.model.inputs import format_positions
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Judge = Callable[..., dict[str, Any]]

PORTS = Path(__file__).parent / "ports" / "far.py"
EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
LAYER = 2

# Blamed on the default golden, and passed by one whose rows end at position 47.
MISTAKES = {
    "ModuloPositions": ["q_rope", "k_rope"],
    "ClampedPositions": ["q_rope", "k_rope"],
    "Bfloat16Positions": ["q_rope", "k_rope"],
    "Float16Positions": ["q_rope", "k_rope"],
    "CountedPositions": ["q_rope", "k_rope"],
    "WindowOf128": ["attn_context"],
}
COMMONEST = ("ModuloPositions", "CountedPositions", "WindowOf128")
RIGHT = [
    "builtin",
    "reference",
    f"{PORTS}:ExactAngles",
    f"{PORTS}:DividedAngles",
    f"{PORTS}:BlackBoxCountedPositions",
    f"{EXAMPLES / 'minimal_port.py'}:DecoderLayer",
    f"{EXAMPLES / 'transformers_port.py'}:Eager",
    f"{EXAMPLES / 'transformers_port.py'}:BatchedExperts",
]
NAMES = {
    "ModuloPositions": ("rope_positions_modulo", {"modulo": 128}),
    "BlackBoxModuloPositions": ("rope_positions_modulo", {"modulo": 128}),
    "ClampedPositions": ("rope_positions_clamped", {"last": 4095}),
    "Bfloat16Positions": ("rope_positions_low_precision", {"dtype": "bfloat16"}),
    "CountedPositions": ("rope_positions_counted", {}),
    "WindowOf128": ("sliding_window", {"window": 128}),
}
# A black box; and a mistake whose wrong tokens all lie in the short rows.
FIRST_NAMED = ("BlackBoxModuloPositions", "ClampedPositions")


@pytest.fixture(scope="module")
def far_golden(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden that a user gets who names no inputs."""
    directory = tmp_path_factory.mktemp("far") / "full_model"
    arguments = ["extract-all", "--model", str(toy), "--output-dir", str(directory), "--certify", "--quiet"]
    result = click.testing.CliRunner().invoke(mm2_gpu, arguments)
    assert result.exit_code == 0, result.output
    return directory


@pytest.fixture(scope="module")
def decoded_golden(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden of rows far out, whose last tokens can be decoded, up to the layer that is judged."""
    directory = tmp_path_factory.mktemp("decoded") / "golden"
    arguments = ["multi-layer", "--start-layer", "0", "--end-layer", str(LAYER + 1), "--model", str(toy)]
    arguments += ["--seq-len", "12,12", "--start-positions", "122,65530"]
    arguments += ["--output-dir", str(directory), "--quiet"]
    result = click.testing.CliRunner().invoke(mm2_gpu, arguments)
    assert result.exit_code == 0, result.output
    return directory


@pytest.fixture
def judge(toy: Path, command: Command, tmp_path: Path) -> Judge:
    """Runs one layer of a port on a golden's inputs and judges it."""

    def run(target: str, golden: Path, *options: object) -> dict[str, Any]:
        result = command(
            mm2_test,
            *("single-layer", "--layer", LAYER, "--model", toy, "--golden", golden, "--target", target),
            *(
                "--backend",
                "cpu",
                "--output-dir",
                tmp_path / "run",
                "--overwrite",
                "--json",
                "--quiet",
                *options,
            ),
        )
        return {"exit_code": result.exit_code, **json.loads(result.stdout)}

    return run


def test_default_golden_says_its_positions_and_is_certified(far_golden: Path) -> None:
    capture = Capture.open(far_golden)
    assert format_positions(capture.read_inputs()) == "positions 0-143, 4088-4111, 65528-65543, 196592-196607"
    certificate = capture.manifest.certificate
    assert certificate is not None
    assert {str(check.outcome) for check in certificate.checks} == {"passed"}


@pytest.mark.parametrize(
    ("name", "sites"),
    [
        pytest.param(name, sites, id=name, marks=() if name in COMMONEST else pytest.mark.slow)
        for name, sites in MISTAKES.items()
    ],
)
def test_mistake_far_out_is_blamed_on_the_default_golden_alone(
    name: str, sites: list[str], golden: Path, far_golden: Path, judge: Judge
) -> None:
    near = judge(f"{PORTS}:{name}", golden)
    assert (near["exit_code"], near["verdict"], near["blame"]) == (0, "pass", [])
    far = judge(f"{PORTS}:{name}", far_golden)
    assert (far["exit_code"], far["verdict"]) == (1, "fail")
    assert [(blame["layer"], blame["sites"]) for blame in far["blame"]] == [(LAYER, [site]) for site in sites]


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, id=target.split("/")[-1], marks=() if number % 2 else pytest.mark.slow)
        for number, target in enumerate(RIGHT)
    ],
)
def test_right_port_passes_far_out(target: str, far_golden: Path, judge: Judge) -> None:
    record = judge(target, far_golden)
    assert (record["exit_code"], record["verdict"], record["blame"]) == (0, "pass", [])


def test_black_box_fails_where_positions_begin_anew_within_a_row(far_golden: Path, judge: Judge) -> None:
    record = judge(f"{PORTS}:BlackBoxModuloPositions", far_golden)
    assert (record["exit_code"], record["compared"]) == (1, 1)
    assert "attn_context" in record["blame"][0]["sites"]


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        ("builtin", "pass"),
        (f"{EXAMPLES / 'cached_port.py'}:DecoderLayer", "pass"),
        (f"{PORTS}:ModuloPositionsWhereDecoded", "fail"),
    ],
    ids=["builtin", "cached_port", "modulo"],
)
def test_decoded_rows_are_judged_far_out(
    target: str, verdict: str, decoded_golden: Path, judge: Judge
) -> None:
    assert judge(target, decoded_golden, "--decode", 4)["verdict"] == verdict


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FIRST_NAMED else pytest.mark.slow) for name in NAMES],
)
def test_mistake_far_out_is_named(
    name: str, toy: Path, far_golden: Path, judge: Judge, command: Command, tmp_path: Path
) -> None:
    judge(f"{PORTS}:{name}", far_golden)
    paths = ("--model", toy, "--golden", far_golden, "--run", tmp_path / "run")
    record = json.loads(command(mm2_diagnose, *paths, "--json", "--quiet").stdout)
    first = record["diagnosis"][0]
    assert (first["mistake"], first["parameters"]) == NAMES[name]
    assert first["leaves"] < 1.5


@pytest.mark.slow
def test_float16_positions_are_named_where_they_are_finite(
    toy: Path, judge: Judge, command: Command, tmp_path: Path
) -> None:
    golden = tmp_path / "golden"
    rows = ("--seq-len", "40,60", "--start-positions", "0,4088")
    assert command(mm2_gpu, "extract-all", "--model", toy, *rows, "--output-dir", golden).exit_code == 0
    judge(f"{PORTS}:Float16Positions", golden)
    paths = ("--model", toy, "--golden", golden, "--run", tmp_path / "run")
    record = json.loads(command(mm2_diagnose, *paths, "--json", "--quiet").stdout)
    first = record["diagnosis"][0]
    assert (first["mistake"], first["parameters"]) == ("rope_positions_low_precision", {"dtype": "float16"})

"""The default golden's far rows, and goldens of long rows' last tokens, find what is right near position 0 alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.diagnosis.cli import main as mm2_diagnose
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.model.inputs import format_positions
from minimax_tools.model.sites import Site
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Judge = Callable[..., dict[str, Any]]

PORTS = Path(__file__).parent / "ports" / "far.py"
EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
LAYER = 2
MODEL = SyntheticModel(
    num_hidden_layers=3,
    hidden_size=64,
    num_local_experts=8,
    num_experts_per_tok=2,
    intermediate_size=32,
    vocab_size=512,
)
LAST = 4
OF_LAYER = ("single-layer", "--layer", LAYER)
LONG = (*OF_LAYER, "--seq-len", "560,530")
# Goldens by name: the command that makes each.
GOLDENS = {
    # What a user gets who names no inputs.
    "far": ("extract-all", "--certify"),
    "near": (*OF_LAYER, "--seq-len", "48,33"),
    # Rows whose last tokens can be decoded, up to the layer that is judged.
    "decoded": (
        *("multi-layer", "--start-layer", 0, "--end-layer", LAYER),
        *("--seq-len", "12,12", "--start-positions", "122,65530"),
    ),
    "finite": (*OF_LAYER, "--seq-len", "40,60", "--start-positions", "0,4088"),
    "long": LONG,
    "last": (*LONG, "--last-tokens", LAST),
}

# What each is blamed for, its name, and the name's parameters.
MISTAKES = {
    "ModuloPositions": (("q_rope", "k_rope"), "rope_positions_modulo", {"modulo": 128}),
    "ClampedPositions": (("q_rope", "k_rope"), "rope_positions_clamped", {"last": 4095}),
    "Bfloat16Positions": (("q_rope", "k_rope"), "rope_positions_low_precision", {"dtype": "bfloat16"}),
    "CountedPositions": (("q_rope", "k_rope"), "rope_positions_counted", {}),
    "WindowOf128": (("attn_context",), "sliding_window", {"window": 128}),
    # Named where its positions are finite alone.
    "Float16Positions": (("q_rope", "k_rope"), "", {}),
    # A black box.
    "BlackBoxModuloPositions": ((), "rope_positions_modulo", {"modulo": 128}),
}
COMMONEST = ("ModuloPositions", "CountedPositions", "WindowOf128")
# The wrong tokens of the second all lie in the short rows.
FIRST_NAMED = ("BlackBoxModuloPositions", "ClampedPositions")
RIGHT = [
    *("builtin", "reference"),
    *(f"{PORTS}:{name}" for name in ("ExactAngles", "DividedAngles", "BlackBoxCountedPositions")),
    f"{EXAMPLES}/minimal_port.py:DecoderLayer",
    f"{EXAMPLES}/transformers_port.py:Eager",
    f"{EXAMPLES}/transformers_port.py:BatchedExperts",
]


def slow_but(names: Any, first: Any) -> list[Any]:
    """Return parameters of which all but some are slow."""
    return [pytest.param(name, marks=() if name in first else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("far") / "model"
    synthesize(folder, model=MODEL, dtype=torch.float8_e4m3fn, shard_size_bytes=None, seed=0)
    return folder


@pytest.fixture(scope="module")
def golden_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a golden of a name, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "golden"
            words = (*GOLDENS[name], "--model", model, "--output-dir", made[name], "--quiet")
            result = click.testing.CliRunner().invoke(mm2_gpu, [str(word) for word in words])
            assert result.exit_code == 0, result.output
        return made[name]

    return make


@pytest.fixture
def judge(model: Path, golden_of: Any, command: Command, tmp_path: Path) -> Judge:
    """Runs one layer of a port on a golden's inputs and judges it."""

    def run(target: str, golden: str, *options: object) -> dict[str, Any]:
        target = f"{PORTS}:{target}" if target in MISTAKES or target == "WindowOf512" else target
        sides = ("--model", model, "--golden", golden_of(golden), "--target", target, "--backend", "cpu")
        place = ("--output-dir", tmp_path / "run", "--overwrite", "--json", "--quiet")
        result = command(mm2_test, *OF_LAYER, *sides, *place, *options)
        return {"exit_code": result.exit_code, **json.loads(result.stdout)}

    return run


@pytest.fixture
def diagnose(model: Path, golden_of: Any, judge: Judge, command: Command, tmp_path: Path) -> Judge:
    """The first diagnosis of a port, judged on a golden."""

    def run(target: str, golden: str) -> dict[str, Any]:
        judge(target, golden)
        paths = ("--model", model, "--golden", golden_of(golden), "--run", tmp_path / "run")
        record = json.loads(command(mm2_diagnose, *paths, "--json", "--quiet").stdout)
        first: dict[str, Any] = record["diagnosis"][0]
        return first

    return run


def test_default_golden_says_its_positions_and_is_certified(golden_of: Any) -> None:
    capture = Capture.open(golden_of("far"))
    assert format_positions(capture.read_inputs()) == "positions 0-143, 4088-4107, 65528-65543, 196592-196607"
    certificate = capture.manifest.certificate
    assert certificate is not None
    assert {str(check.outcome) for check in certificate.checks} == {"passed"}


@pytest.mark.parametrize(
    "name", slow_but([name for name, (sites, _, _) in MISTAKES.items() if sites], COMMONEST)
)
def test_mistake_far_out_is_blamed_on_the_default_golden_alone(name: str, judge: Judge) -> None:
    near = judge(name, "near")
    assert (near["exit_code"], near["verdict"], near["blame"]) == (0, "pass", [])
    far = judge(name, "far")
    assert (far["exit_code"], far["verdict"]) == (1, "fail")
    sites, _, _ = MISTAKES[name]
    assert [(blame["layer"], blame["sites"]) for blame in far["blame"]] == [(LAYER, [site]) for site in sites]


@pytest.mark.parametrize("target", slow_but(RIGHT, RIGHT[1::2]), ids=lambda target: target.split("/")[-1])
def test_right_port_passes_far_out(target: str, judge: Judge) -> None:
    record = judge(target, "far")
    assert (record["exit_code"], record["verdict"], record["blame"]) == (0, "pass", [])


def test_black_box_fails_where_positions_begin_anew_within_a_row(judge: Judge) -> None:
    record = judge("BlackBoxModuloPositions", "far")
    assert (record["exit_code"], record["compared"]) == (1, 1)
    assert "attn_context" in record["blame"][0]["sites"]


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        ("builtin", "pass"),
        (f"{EXAMPLES}/cached_port.py:DecoderLayer", "pass"),
        (f"{PORTS}:ModuloPositionsWhereDecoded", "fail"),
    ],
    ids=["builtin", "cached_port", "modulo"],
)
def test_decoded_rows_are_judged_far_out(target: str, verdict: str, judge: Judge) -> None:
    assert judge(target, "decoded", "--decode", 4)["verdict"] == verdict


@pytest.mark.parametrize(
    "name", slow_but([name for name, (_, mistake, _) in MISTAKES.items() if mistake], FIRST_NAMED)
)
def test_mistake_far_out_is_named(name: str, diagnose: Judge) -> None:
    first = diagnose(name, "far")
    assert (first["mistake"], first["parameters"]) == MISTAKES[name][1:]
    assert first["leaves"] < 1.5


@pytest.mark.slow
def test_float16_positions_are_named_where_they_are_finite(diagnose: Judge) -> None:
    first = diagnose("Float16Positions", "finite")
    assert (first["mistake"], first["parameters"]) == ("rope_positions_low_precision", {"dtype": "float16"})


class TestLastTokens:
    """Goldens of long rows that keep each row's last tokens alone."""

    def test_right_port_passes_and_the_verdict_says_which_tokens_were_judged(self, judge: Judge) -> None:
        record = judge(f"{EXAMPLES}/port.py:DecoderLayer", "last")
        assert (record["exit_code"], record["verdict"]) == (0, "pass")
        assert any(note.startswith(f"only the last {LAST} tokens of each row") for note in record["notes"])

    def test_window_beyond_the_default_rows_fails_on_long_rows_alone(self, judge: Judge) -> None:
        assert judge("WindowOf512", "far")["exit_code"] == 0
        record = judge("WindowOf512", "last")
        assert record["exit_code"] == 1
        assert [blame["sites"] for blame in record["blame"]] == [["attn_context"]]

    def test_last_tokens_are_those_of_the_golden_of_all_tokens(self, golden_of: Any) -> None:
        last, whole = Capture.open(golden_of("last")), Capture.open(golden_of("long"))
        is_kept = last.read_kept_mask()
        assert is_kept.sum(1).tolist() == [LAST, LAST]
        for site in whole.sites(LAYER):
            kept, every = (capture.read(LAYER, site) for capture in (last, whole))
            if site.has_heads_dim:
                kept, every = kept.transpose(1, 2), every.transpose(1, 2)
            assert torch.equal(kept[is_kept], every[is_kept]), site
            twins = [capture.read_twin(LAYER, site) for capture in (last, whole)]
            if twins[0] is not None and twins[1] is not None and not site.has_heads_dim:
                assert torch.equal(twins[0][is_kept], twins[1][is_kept]), site
        real = whole.read_attention_mask().bool()
        for site in (Site.INPUT, Site.OUTPUT, Site.V_PROJ):
            assert torch.equal(last.read(LAYER, site)[real], whole.read(LAYER, site)[real]), site

    def test_golden_takes_a_fraction_of_the_disk(self, golden_of: Any) -> None:
        last, whole = (
            sum(file.stat().st_size for file in golden_of(name).iterdir()) for name in ("last", "long")
        )
        assert last < whole / 4

    def test_golden_is_certified(self, command: Command, model: Path, golden_of: Any) -> None:
        result = command(mm2_gpu, "certify", "--model", model, "--golden", golden_of("last"))
        assert result.exit_code == 0, result.output

    def test_whole_port_refuses_it_in_a_sentence(self, command: Command, model: Path, golden_of: Any) -> None:
        sides = ("--model", model, "--golden", golden_of("last"), "--target", "any.py:Model")
        result = command(mm2_test, "model", *sides)
        assert result.exit_code == 3
        text = f"keeps the last {LAST} tokens of each row alone: expected a golden of every token"
        assert text in result.stderr

    @pytest.mark.parametrize(
        ("rows", "words"),
        [((), "none is named"), (("--seq-len", "9,3"), "keeps more tokens than row 1 has")],
        ids=["no_rows", "short_row"],
    )
    def test_rows_that_have_not_so_many_tokens_are_refused(
        self, rows: tuple[str, ...], words: str, command: Command, model: Path, tmp_path: Path
    ) -> None:
        options = ("--last-tokens", LAST, "--output-dir", tmp_path / "golden")
        result = command(mm2_gpu, *OF_LAYER, "--model", model, *rows, *options)
        assert result.exit_code == 2
        assert words in result.stderr

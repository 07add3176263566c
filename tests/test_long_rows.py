"""Goldens of long rows that keep each row's last tokens alone: what short rows cannot show is found on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

PORTS = Path(__file__).parent / "ports" / "far.py"
RIGHT = Path(__file__).parents[1] / "scripts" / "examples" / "port.py"
LAST = 4
ROWS = ("--seq-len", "560,530")


@pytest.fixture(scope="module")
def goldens(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Goldens of the first layer: of long rows' last tokens, of all tokens of these rows, and of the default rows."""
    options = {"last": (*ROWS, "--last-tokens", str(LAST)), "all": ROWS, "default": ()}
    folders = {name: tmp_path_factory.mktemp(name) / "golden" for name in options}
    for name, given in options.items():
        arguments = ["single-layer", "--layer", "0", "--model", str(toy), *given]
        arguments += ["--output-dir", str(folders[name]), "--quiet"]
        result = click.testing.CliRunner().invoke(mm2_gpu, arguments)
        assert result.exit_code == 0, result.output
    return folders


@pytest.fixture
def judge(command: Command, toy: Path, goldens: dict[str, Path], tmp_path: Path) -> Callable[..., Any]:
    """Run a port on a golden; return the exit code and the JSON."""

    def run(port: str, golden: str) -> tuple[int, dict[str, Any]]:
        arguments = ("--model", toy, "--golden", goldens[golden], "--target", port, "--backend", "cpu")
        result = command(
            mm2_test, "single-layer", "--layer", "0", *arguments, "--output-dir", tmp_path / golden, "--json"
        )
        return result.exit_code, json.loads(result.stdout)

    return run


def test_right_port_passes_and_the_verdict_says_which_tokens_were_judged(judge: Any) -> None:
    code, record = judge(f"{RIGHT}:DecoderLayer", "last")
    assert (code, record["verdict"]) == (0, "pass")
    assert any(note.startswith(f"only the last {LAST} tokens of each row") for note in record["notes"])


def test_window_beyond_the_default_rows_fails_on_long_rows_alone(judge: Any) -> None:
    code, _ = judge(f"{PORTS}:WindowOf512", "default")
    assert code == 0
    code, record = judge(f"{PORTS}:WindowOf512", "last")
    assert code == 1
    assert [blame["sites"] for blame in record["blame"]] == [["attn_context"]]


def test_last_tokens_are_those_of_the_golden_of_all_tokens(goldens: dict[str, Path]) -> None:
    last, whole = Capture.open(goldens["last"]), Capture.open(goldens["all"])
    is_kept = last.read_kept_mask()
    assert is_kept.sum(1).tolist() == [LAST, LAST]
    for site in whole.sites(0):
        kept, every = (capture.read(0, site) for capture in (last, whole))
        if site.has_heads_dim:
            kept, every = kept.transpose(1, 2), every.transpose(1, 2)
        assert torch.equal(kept[is_kept], every[is_kept]), site
        twins = [capture.read_twin(0, site) for capture in (last, whole)]
        if twins[0] is not None and twins[1] is not None and not site.has_heads_dim:
            assert torch.equal(twins[0][is_kept], twins[1][is_kept]), site
    real = whole.read_attention_mask().bool()
    for site in (Site.INPUT, Site.OUTPUT, Site.V_PROJ):
        assert torch.equal(last.read(0, site)[real], whole.read(0, site)[real]), site


def test_golden_takes_a_fraction_of_the_disk(goldens: dict[str, Path]) -> None:
    last, whole = (sum(file.stat().st_size for file in goldens[name].iterdir()) for name in ("last", "all"))
    assert last < whole / 4


def test_golden_of_last_tokens_is_certified(command: Command, toy: Path, goldens: dict[str, Path]) -> None:
    result = command(mm2_gpu, "certify", "--model", toy, "--golden", goldens["last"])
    assert result.exit_code == 0, result.output


def test_whole_port_refuses_it_in_a_sentence(command: Command, toy: Path, goldens: dict[str, Path]) -> None:
    result = command(
        mm2_test, "model", "--model", toy, "--golden", goldens["last"], "--target", "any.py:Model"
    )
    assert result.exit_code == 3
    assert (
        f"keeps the last {LAST} tokens of each row alone: expected a golden of every token" in result.stderr
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [((), "none is named"), (("--seq-len", "9,3"), "keeps more tokens than row 1 has")],
    ids=["no_rows", "short_row"],
)
def test_rows_that_have_not_so_many_tokens_are_refused(
    rows: tuple[str, ...], words: str, command: Command, toy: Path, tmp_path: Path
) -> None:
    options = ("--last-tokens", str(LAST), "--output-dir", tmp_path / "golden")
    result = command(mm2_gpu, "single-layer", "--layer", "0", "--model", toy, *rows, *options)
    assert result.exit_code == 2
    assert words in result.stderr

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest
import torch
from click.shell_completion import ShellComplete

from compare.cli import main as mm2_compare
from minimax_tools.command_line import options
from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.group import Mm2Group
from minimax_tools.command_line.options import read_span
from minimax_tools.errors import UsageError, did_you_mean
from minimax_tools.model.span import Span
from neuron.cli import main as mm2_test


def parse(decorator: Callable[..., Any], *arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = {}

    @click.command(cls=Mm2Command)
    @decorator
    def command(**found: Any) -> None:
        values.update(found)

    result = click.testing.CliRunner().invoke(command, list(arguments))
    assert result.exit_code == 0, result.output
    return values


def test_a_command_gets_the_dtype_that_the_option_names() -> None:
    assert parse(options.run_options)["dtype"] == torch.bfloat16
    assert parse(options.run_options, "--dtype", "float32")["dtype"] == torch.float32


def test_lengths_are_parsed_at_the_edge() -> None:
    request = parse(options.input_options, "--seq-len", "96,61", "--pad-to", "128, 512")["inputs"]
    assert (request.seq_lens, request.pad_to) == ((96, 61), (128, 512))
    assert parse(options.input_options)["inputs"].seq_lens == ()


def test_input_options_become_one_request() -> None:
    arguments = ["--prompt", "a", "--prompt", "b", "--chat", "--padding-side", "left", "--max-length", "9"]
    arguments += ["--start-positions", "0,8"]
    both = options.stack_options(options.input_options, options.run_options)
    request = parse(both, *arguments, "--seed", "4")["inputs"]
    assert (request.prompts, request.chat, request.padding_side) == (("a", "b"), True, "left")
    assert (request.max_length, request.batch_size, request.seed) == (9, 1, 4)
    assert request.start_positions == (0, 8)


def test_spans_are_read_in_both_notations() -> None:
    assert read_span(0, 5, None) == Span(0, 6)
    assert read_span(None, None, "0:5") == Span(0, 5)
    assert read_span(None, None, None) is None
    for start, end, layers, message in (
        (0, None, None, "come together"),
        (0, 1, "0:2", "both given"),
        (4, 2, None, "are no span"),
    ):
        with pytest.raises(UsageError, match=message):
            read_span(start, end, layers)


def test_memory_budget_is_bytes_and_none_where_it_is_absent() -> None:
    assert parse(options.memory_budget_option) == {"memory_budget": None}
    for text, size_bytes in (("12GB", 12 * 10**9), ("12 GiB", 12 * 2**30), ("500mb", 500 * 10**6)):
        assert parse(options.memory_budget_option, "--memory-budget", text) == {"memory_budget": size_bytes}


LENGTHS = "expected positive lengths, for example 96,61"
POSITIONS = "expected positions from 0 on, for example 0,4096,65536"
SIZES = "expected a size, for example 500MB, 2GB or 64MiB"


@pytest.mark.parametrize(
    ("decorator", "option", "texts", "expected"),
    [
        (options.input_options, "--seq-len", ("", "a", "1,", "0", "-4", "1.5"), LENGTHS),
        (options.input_options, "--start-positions", ("", "a", "1,", "-4", "1.5"), POSITIONS),
        (options.memory_budget_option, "--memory-budget", ("much", "12", "0GB", "-1GB", "0.1B", ""), SIZES),
    ],
)
def test_value_that_is_none_is_refused(
    decorator: Any, option: str, texts: tuple[str, ...], expected: str
) -> None:
    command = click.command()(decorator(lambda **_: None))
    for text in texts:
        result = click.testing.CliRunner().invoke(command, [option, text])
        assert result.exit_code == 2, text
        assert f"'{option}': " in result.stderr
        assert expected in result.stderr


@click.group(cls=Mm2Group)
def main() -> None:
    """A command for these tests."""


@main.command("sweep", cls=Mm2Command)
@click.option("--backend", type=click.Choice(["auto", "xla-cpu"]), default="auto")
@click.option("--model", envvar="MM2_MODEL", required=True)
def sweep(backend: str, model: str) -> None:
    click.echo(f"{backend} {model}")


def fail(*words: str) -> str:
    result = click.testing.CliRunner().invoke(main, words)
    assert result.exit_code == 2
    return result.output


def test_near_names_are_suggested() -> None:
    assert did_you_mean("swep", ["sweep", "full"]) == "Did you mean sweep?"
    assert did_you_mean("XLA_CPU", ["xla-cpu"]) == "Did you mean xla-cpu?"
    assert did_you_mean("decoderlayr", ["DecoderLayer", "Moe"]) == "Did you mean DecoderLayer?"
    assert did_you_mean("banana", ["sweep", "full"]) == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("swep",), "No such command 'swep'. Did you mean sweep?"),
        (("sweep", "--modle", "m"), "--model"),
        (("sweep", "--model", "m", "--backend", "xlacpu"), "Did you mean xla-cpu?"),
    ],
)
def test_wrong_name_is_answered_by_a_near_one(words: tuple[str, ...], told: str) -> None:
    assert told in fail(*words)


@pytest.mark.parametrize("words", [("banana",), ("sweep", "--model", "m", "--backend", "banana")])
def test_name_like_no_other_gets_no_suggestion(words: tuple[str, ...]) -> None:
    output = fail(*words)
    assert "banana" in output
    assert "Did you mean" not in output


def test_missing_option_names_its_variable_and_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MM2_MODEL", raising=False)
    output = fail("sweep")
    assert "Missing option '--model'" in output
    assert "MM2_MODEL" in output
    assert "model = … into mm2.toml" in output
    monkeypatch.setenv("MM2_MODEL", "toy")
    assert click.testing.CliRunner().invoke(main, ["sweep"]).output == "auto toy\n"


GOLDEN, RUN = "kept/gpu_reference/full_model", "kept/neuron/sweep_0_to_3"


@pytest.fixture
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GOLDEN, RUN):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "kept" / "gpu_reference" / "no_capture").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MM2_CAPTURES", "kept")


def complete(command: click.Command, *words: str, incomplete: str = "") -> list[str]:
    found = ShellComplete(command, {}, "mm2", "_MM2_COMPLETE").get_completions(list(words), incomplete)
    return [item.value for item in found]


def test_commands_options_and_choices_are_completed() -> None:
    assert complete(mm2_test, incomplete="sw") == ["sweep"]
    assert complete(mm2_test, "sweep", incomplete="--gol") == ["--golden"]
    assert complete(mm2_test, "sweep", "--backend", incomplete="x") == ["xla-cpu"]


@pytest.mark.usefixtures("captures")
def test_goldens_and_runs_are_completed_from_the_captures() -> None:
    assert complete(mm2_compare, "--golden") == [GOLDEN]
    assert complete(mm2_compare, "--gpu-path") == [GOLDEN]
    assert complete(mm2_compare, "--run") == [RUN]
    assert complete(mm2_test, "sweep", "--golden", incomplete="kept/") == [GOLDEN]
    assert complete(mm2_test, "sweep", "--captures", "elsewhere", "--golden") == [""]


@pytest.mark.usefixtures("captures")
def test_wrong_project_file_does_not_stop_a_completion() -> None:
    Path("mm2.toml").write_text("modle = 3")
    assert complete(mm2_compare, "--run") == [RUN]


def test_a_completion_asks_no_server(s3: Any) -> None:
    words = ("sweep", "--golden", "s3://lab/golden", "--output-dir", "s3://lab/run")
    assert complete(mm2_test, *words, incomplete="--backe") == ["--backend"]
    assert s3.requests == []


def test_bash_gets_its_script_from_the_supervised_program() -> None:
    environment = os.environ | {"_MM2_TEST_COMPLETE": "bash_source"}
    program = "import sys; sys.argv[0] = 'mm2-test'; from neuron.__main__ import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "_MM2_TEST_COMPLETE=bash_complete" in result.stdout
    assert "complete -o nosort -F _mm2_test_completion mm2-test" in result.stdout

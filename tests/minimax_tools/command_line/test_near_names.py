from __future__ import annotations

import click
import click.testing
import pytest

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.group import Mm2Group
from minimax_tools.errors import did_you_mean


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

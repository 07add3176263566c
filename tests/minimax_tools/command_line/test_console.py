"""Warnings and log messages of foreign code hold no control characters."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest

from minimax_tools.command_line.console import (
    CommandEnd,
    Mm2Command,
    print_json,
    print_text,
    printable_messages,
    speak_as,
)
from minimax_tools.command_line.group import Mm2Group
from minimax_tools.command_line.options import output_options
from minimax_tools.errors import CaptureError, UsageError
from minimax_tools.machine.stops import same_command

logger = logging.getLogger("minimax_tools.test_console")


@click.group(cls=Mm2Group)
def main() -> None:
    """A command for these tests."""


def add(name: str, error: BaseException | None = None) -> None:
    @main.command(name)
    @output_options
    def command(as_json: bool) -> None:
        logger.debug("a detail")
        logger.info("progress")
        logger.warning("a warning")
        if error is not None:
            raise error
        if as_json:
            print_json({"ρ": 1.5}, next_commands=["mm2-test check"])


for name, error in {
    "well": None,
    "usage": UsageError("you erred", next_step="Do better."),
    "capture": CaptureError("no capture"),
    "crash": ZeroDivisionError("by zero"),
    "stop": KeyboardInterrupt(),
    "differs": CommandEnd(1),
    "exits": SystemExit(0),
    "bad": click.BadParameter("odd"),
    "leave": click.exceptions.Exit(0),
}.items():
    add(name, error)


def run(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, list(arguments))


CRASHED = "Error: unexpected ZeroDivisionError: by zero. Run again with --debug for the traceback.\n"


@pytest.mark.parametrize(
    ("name", "exit_code", "message"),
    [
        ("well", 0, ""),
        ("usage", 2, "Error: you erred. Do better.\n"),
        ("capture", 3, "Error: no capture\n"),
        ("crash", 3, CRASHED),
        ("stop", 3, "Error: interrupted. Run it again with: main stop --quiet\n"),
        ("differs", 1, ""),
        ("exits", 3, "Error: code that this command ran exited: found exit code 0\n"),
        ("bad", 2, "odd"),
        ("leave", 0, ""),
    ],
)
def test_exit_codes(name: str, exit_code: int, message: str) -> None:
    result = run(name, "--quiet")
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_no_error_of_an_option_exits_with_1() -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    option = click.Option(["--size"], callback=crash, default="1")
    result = click.testing.CliRunner().invoke(Mm2Command("sized", params=[option]), [])
    assert result.exit_code == 3
    assert CRASHED in result.stderr


def test_debug_shows_the_traceback_and_keeps_the_exit_code() -> None:
    for name, raised in (("crash", "ZeroDivisionError: by zero"), ("capture", "no capture")):
        result = run(name, "--debug")
        assert "Traceback (most recent call last)" in result.stderr
        assert raised in result.stderr
        assert result.exit_code == 3


def test_error_is_one_json_object_where_json_was_asked_for() -> None:
    result = run("capture", "--json")
    assert json.loads(result.stdout) == {
        "schema_version": 2,
        "verdict": "incomparable",
        "compared": 0,
        "of": 0,
        "blame": [],
        "error": "no capture",
        "exit_code": 3,
        "next": [],
    }
    usage = json.loads(run("usage", "--json").stdout)
    assert (usage["error"], usage["exit_code"]) == ("you erred. Do better.", 2)
    assert "verdict" not in usage
    (help_,) = usage["next"]
    assert help_.endswith(" usage --help")


def test_text_ends_in_the_commands_to_run_next_each_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    long = f"mm2-test show {'folder/' * 40}"
    print_text("PASS", next_commands=[long, "mm2-test check"])
    assert capsys.readouterr().out == f"PASS\n\nNext\n  {long}\n  mm2-test check\n"
    print_text("PASS", next_commands=())
    assert capsys.readouterr().out == "PASS\n"


def test_the_same_command_is_complete_and_leaves_out_what_only_prints(command: Any) -> None:
    @click.group(cls=Mm2Group)
    def main() -> None: ...

    @main.command()
    @click.option("--model")
    @output_options
    def run(model: str, as_json: bool) -> None:
        click.echo(same_command("mm2-test", "--follow"))

    assert command(main, "run", "--model", "my model", "--json").stdout == (
        "mm2-test run --model 'my model' --follow\n"
    )


def test_results_go_to_stdout_and_progress_to_stderr() -> None:
    result = run("well", "--json")
    assert json.loads(result.stdout) == {"schema_version": 2, "ρ": 1.5, "next": ["mm2-test check"]}
    assert result.stderr == "progress\na warning\n"


def test_how_much_is_said() -> None:
    everything = ["a detail", "progress", "a warning"]
    assert run("well").stderr.splitlines() == everything[1:]
    assert run("well", "--quiet").stderr.splitlines() == everything[2:]
    assert run("well", "--debug").stderr.splitlines() == everything
    assert run("well", "--debug", "--quiet").stderr.splitlines() == everything


def test_root_logger_does_not_print_a_second_time(capfd: Any) -> None:
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        assert run("well").stderr == "progress\na warning\n"
    finally:
        logging.getLogger().removeHandler(handler)
    assert "progress" not in capfd.readouterr().err


def test_nan_is_no_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"ratio": float("nan")}, next_commands=())


PRINTS_MUCH = """
import click
from minimax_tools.command_line.console import CommandEnd, Mm2Command

@click.command(cls=Mm2Command)
def main():
    for number in range(100_000):
        click.echo(f"line {number}")

main()
"""


def test_reader_that_stops_reading_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    program, pipe = [sys.executable, "-c", PRINTS_MUCH], subprocess.PIPE
    with subprocess.Popen(program, stdout=pipe, stderr=pipe, env=environment, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 3


def test_one_of_several_says_who_it_is_and_prints_no_json(command: Any) -> None:
    @click.command(cls=Mm2Command)
    @output_options
    def main(as_json: bool) -> None:
        speak_as("rank 3")
        raise UsageError("no such thing")

    result = command(main, "--json")
    assert (result.stdout, result.stderr) == ("", "rank 3: Error: no such thing\n")
    assert result.exit_code == 2


def test_messages_of_foreign_code_are_printed_with_escapes() -> None:
    assert logging.lastResort is not None
    record = logging.LogRecord("library", logging.WARNING, __file__, 1, "a %s", ("\x07bell",), None)

    def format_warning() -> str:
        return warnings.formatwarning("a \x1b[31mport", UserWarning, "port.py", 1, "line")

    with printable_messages():
        assert "a \\x1b[31mport" in format_warning()
        assert logging.lastResort.format(record) == "a \\x07bell"
    assert "\x1b" in format_warning()
    assert logging.lastResort.format(record) == "a \x07bell"

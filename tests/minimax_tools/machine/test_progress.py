from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import output_options
from minimax_tools.machine.progress import LayerProgress, NoProgress, Progress

LOGGER = "minimax_tools.machine.progress"
LONG = "/checkpoint/" + "x" * 120


class Clock:
    """Seconds that pass when they are told to."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=LOGGER)
    return caplog


def without_memory(messages: list[str]) -> list[str]:
    """The lines without what this process happens to hold."""
    return [re.sub(r", (memory|GPU) [\d.]+ .?B", "", text) for text in messages]


def test_without_a_terminal_every_layer_is_a_line(logged: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with LayerProgress(62, clock=clock) as progress:
        for layer in range(3):
            clock.now_s += 4
            progress.advance(layer, num_bytes=10 * 10**9)
    assert without_memory(logged.messages) == [
        "Layer 0 (1 of 62): 4:04 left, 2.5 GB/s",
        "Layer 1 (2 of 62): 4:00 left, 2.5 GB/s",
        "Layer 2 (3 of 62): 3:56 left, 2.5 GB/s",
    ]
    assert all(re.search(r", memory [\d.]+ [MG]B(, GPU|$)", text) for text in logged.messages)


def test_layers_done_before_count_as_done_but_not_in_the_rate(logged: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with LayerProgress(10, clock=clock) as progress:
        for layer in range(5):
            clock.now_s += 100
            progress.skip(layer)
        clock.now_s += 2
        progress.advance(5, num_bytes=2 * 10**9)
    assert without_memory(logged.messages)[-2:] == [
        "Layer 4 (5 of 10): done before",
        "Layer 5 (6 of 10): 0:08 left, 1.0 GB/s",
    ]


def test_where_nobody_listens_nothing_is_shown(logged: pytest.LogCaptureFixture, capfd: Any) -> None:
    # What Python sets where no command has set up its log.
    logged.set_level(logging.WARNING, logger=LOGGER)
    with LayerProgress(1) as progress:
        progress.skip(0)
    nobody: Progress = NoProgress()
    nobody.skip(0)
    nobody.advance(1, num_bytes=10)
    assert (capfd.readouterr(), logged.messages) == (("", ""), [])


@click.command(cls=Mm2Command)
@output_options
def run_layers(as_json: bool) -> None:
    """A command for these tests."""
    with LayerProgress(2) as progress:
        progress.skip(0)
        progress.advance(1, num_bytes=10**9)
    click.echo("the result")


def test_command_without_a_terminal_logs_to_stderr() -> None:
    result = click.testing.CliRunner().invoke(run_layers, [])
    assert result.stdout == "the result\n"
    first, second = result.stderr.splitlines()
    assert first == "Layer 0 (1 of 2): done before"
    assert second.startswith("Layer 1 (2 of 2): took 0:00")


PROGRAM = f"""
import logging, os, sys, threading, time
import click
from minimax_tools.command_line.console import Mm2Command
from minimax_tools.errors import CaptureError
from minimax_tools.command_line.options import output_options
from minimax_tools.machine.progress import LayerProgress

logger = logging.getLogger("minimax_tools.demo")

def chat():
    for number in range(50):
        logger.info("thread line %d", number)

@click.command(cls=Mm2Command)
@output_options
def main(as_json):
    with LayerProgress(6, label="Golden") as progress:
        progress.skip(0)
        for layer in range(1, 6):
            logger.info("Layer %d is [red]read[/red]", layer)
            time.sleep(float(os.environ["LAYER_S"]))
            progress.advance(layer, num_bytes=3_000_000_000)
        print("an early result")
        print("by print", file=sys.stderr)
        logger.warning({LONG!r})
        threads = [threading.Thread(target=chat) for _ in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    logger.info("after the bar")
    click.echo("the result")
    with LayerProgress(3, label="Broken") as progress:
        progress.advance(0, num_bytes=7)
        raise CaptureError("no capture")

main()
"""


@dataclass
class Seen:
    """The output of a program, on its terminal and in its pipe."""

    written: str
    rows: list[str]
    stdout: str
    exit_code: int


def run_in_terminal(
    *arguments: str, columns: int = 80, term: str = "xterm-256color", layer_s: float = 0
) -> Seen:
    """Run the program with a real pseudo-terminal for its stderr."""
    own, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"TERM": term, "LAYER_S": str(layer_s), "PYTHONPATH": str(Path(__file__).parents[3])}
    program = [sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(
        program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=its, env=environment, text=True
    ) as process:
        os.close(its)
        written = b""
        # Linux ends a terminal that nobody holds any more with an error.
        while chunk := _read(own):
            written += chunk
        assert process.stdout is not None
        stdout = process.stdout.read()
    os.close(own)
    text = written.decode()
    return Seen(written=text, rows=render(text, columns=columns), stdout=stdout, exit_code=process.returncode)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def render(text: str, *, columns: int) -> list[str]:
    """The rows that a terminal shows in the end; an escape sequence that it does not know is an error."""
    rows: list[list[str]] = [[]]
    row = column = 0
    for argument, command, character in re.findall(r"\x1b\[([?0-9;]*)([A-Za-z])|(.)", text, re.DOTALL):
        if character == "\r":
            column = 0
        elif character and (character == "\n" or column == columns):
            row, column = row + 1, 0
            rows.extend([] for _ in range(row + 1 - len(rows)))
        elif command == "A":
            row -= int(argument or 1)
        elif command == "K":
            rows[row] = [] if argument == "2" else rows[row][:column]
        elif command:
            assert command in "mhl", f"escape sequence {argument}{command}"
        if character and character not in "\r\n":
            rows[row].extend(" " * (column + 1 - len(rows[row])))
            rows[row][column] = character
            column += 1
    return ["".join(cells).rstrip() for cells in rows]


@pytest.fixture(scope="module")
def seen() -> Seen:
    # Longer than a refresh of the bar takes.
    return run_in_terminal(layer_s=0.3)


def test_terminal_shows_one_bar_with_everything_on_one_row(seen: Seen) -> None:
    bars = [row for row in seen.rows if row.startswith("Golden")]
    assert len(bars) == 1
    bar = r"Golden +━+ 6/6 · layer 5 · took \d+:\d\d · [\d.]+ .B/s · memory [\d.]+ MB"
    assert re.fullmatch(bar, bars[0]), bars


def test_lines_written_while_the_bar_is_live_stay_whole_above_it(seen: Seen) -> None:
    bar = next(number for number, row in enumerate(seen.rows) if row.startswith("Golden"))
    above = seen.rows[:bar]
    assert above[:5] == [f"Layer {layer} is [red]read[/red]" for layer in range(1, 6)]
    assert above[5] == "by print"
    assert "".join(above[6:8]) == LONG
    assert sorted(above[8:]) == sorted(f"thread line {number}" for number in range(50) for _ in range(2))
    # The terminal broke the long line, mm2 did not: it can be copied whole.
    assert LONG in seen.written


def test_after_the_bar_stderr_is_as_before(seen: Seen) -> None:
    bar = next(number for number, row in enumerate(seen.rows) if row.startswith("Golden"))
    assert seen.rows[bar + 1] == "after the bar"
    assert seen.written.rindex("\x1b[?25h") > seen.written.rindex("\x1b[?25l")


def test_error_ends_the_bar_and_is_one_message_below_it(seen: Seen) -> None:
    broken = [number for number, row in enumerate(seen.rows) if row.startswith("Broken")]
    assert len(broken) == 1
    assert "1/3 · layer 0" in seen.rows[broken[0]]
    assert seen.rows[broken[0] + 1 :] == ["Error: no capture", ""]
    assert seen.exit_code == 3


def test_quiet_terminal_shows_no_bar() -> None:
    seen = run_in_terminal("--quiet")
    assert "\x1b" not in seen.written
    assert "Golden" not in seen.written
    assert seen.rows[0] == "by print"


def test_terminal_without_cursor_movement_gets_lines() -> None:
    seen = run_in_terminal(term="dumb")
    assert "\x1b" not in seen.written
    assert "Layer 0 (1 of 6): done before" in seen.rows
    assert any(row.startswith("Layer 5 (6 of 6): took 0:0") for row in seen.rows)

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest

from minimax_tools.cli import mm2_split

Command = Callable[..., click.testing.Result]

NODES = ("--node", "a:memory=800MB", "--node", "b:memory=200MB", "--context-length", "64")
TITLES = (
    "NODE SLICE ASSIGNMENT VERIFICATION",
    "SLICE LOADING VERIFICATION",
    "DOWNLOAD VERIFICATION",
    "DOWNLOAD COMPLETED VERIFICATION",
)


def titles(text: str) -> tuple[str, ...]:
    return tuple(line.split("===")[1].strip() for line in text.splitlines() if "===" in line)


@pytest.fixture
def plan_file(toy: Path, command: Command, tmp_path: Path) -> Path:
    result = command(mm2_split, "plan", "--model", toy, *NODES, "--output", tmp_path / "plan.json", "--quiet")
    assert result.exit_code == 0, result.output
    return tmp_path / "plan.json"


def test_the_command_says_where_the_files_are(toy: Path, plan_file: Path, command: Command) -> None:
    result = command(mm2_split, "fetch", "--plan", plan_file, "--node", "b")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"b: {toy}, ")
    assert "===" not in result.output
    unknown = command(mm2_split, "fetch", "--plan", plan_file, "--node", "c", "--model", toy)
    assert unknown.exit_code == 2
    assert "the plan has no node 'c'" in unknown.output


def test_debug_11_shows_what_is_fetched_and_what_came_in_the_words_of_verify(
    plan_file: Path,
) -> None:
    def run(name: str, *arguments: str, level: str = "11") -> click.testing.Result:
        words = [name, "--plan", str(plan_file), "--node", "b", *arguments]
        return click.testing.CliRunner().invoke(mm2_split, words, env={"DEBUG": level})

    fetched = run("fetch", "--json")
    assert fetched.exit_code == 0, fetched.output
    assert json.loads(fetched.stdout)["node"] == "b"
    assert titles(fetched.stderr) == TITLES
    verified = run("verify").stdout
    for block in fetched.stderr.split("\n\n"):
        assert block.strip() in verified
    assert "Status:   ✅ Complete" in fetched.stderr
    assert titles(run("fetch", level="10").output) == ()

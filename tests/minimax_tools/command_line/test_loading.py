"""Files of commands import little: what a command works with is loaded when it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import click.testing
import pytest

from minimax_tools.command_line.console import Mm2Command, loading

REPOSITORY = Path(__file__).parents[3]
# The module and the command of each program.
PROGRAMS = {
    "mm2-compare": ("compare.cli", "main"),
    "mm2-diagnose": ("compare.diagnosis.cli", "main"),
    "mm2-gpu": ("gpu_reference.cli", "main"),
    "mm2-split": ("minimax_tools.cli", "mm2_split"),
    "mm2-test": ("neuron.cli", "main"),
}
# Libraries that take long to import, or much memory.
HEAVY = (
    *("torch", "numpy", "scipy", "numba", "transformers", "huggingface_hub", "safetensors", "tokenizers"),
    *("cattrs", "jinja2", "yaml", "rich", "psutil"),
)
# Help, an error of usage and a completion of every command of a program, one after the other in a fresh process.
LOOK = """
import importlib, sys
import click
from click.shell_completion import ShellComplete
module, attribute, heavy = sys.argv[1:]
main = getattr(importlib.import_module(module), attribute)
def look(*words):
    try:
        main([*words], standalone_mode=False)
    except click.UsageError as error:
        assert "No such option" in error.format_message()
    loaded = sorted(set(heavy.split(",")) & set(sys.modules))
    assert not loaded, f"{words} loads {', '.join(loaded)}"
commands = [[name] for name in main.list_commands(click.Context(main))] if isinstance(main, click.Group) else [[]]
for words in commands:
    look(*words, "--help")
    look(*words, "--no-such-option")
    completed = ShellComplete(main, {}, "mm2", "_MM2_COMPLETE").get_completions(words, "--js")
    assert [item.value for item in completed] == ["--json"]
    look(*words, "--help")
look("--help")
"""


def look(program: str, *, heavy: tuple[str, ...] = HEAVY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOOK, *PROGRAMS[program], ",".join(heavy)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_errors_of_usage_and_completion_load_no_heavy_library(program: str) -> None:
    done = look(program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_list_of_known_mistakes_loads_no_torch(options: tuple[str, ...]) -> None:
    listing = [sys.executable, "-X", "importtime", "-m", "compare.diagnosis", "--list", *options]
    done = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "gate_up_swapped" in done.stdout
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    # Tables are drawn by rich.
    assert loaded & set(HEAVY) <= {"rich"}


def test_library_that_help_loads_is_named() -> None:
    found = look("mm2-split", heavy=("click",)).stderr
    assert "AssertionError: ('synthesize', '--help') loads click" in found


def declare(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> click.Command:
    (folder / "some_work.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "some_work", raising=False)

    @click.command(cls=Mm2Command)
    @click.option("--size", type=int)
    def command(size: int) -> None:
        """Measure something."""
        with loading():
            from some_work import measure

        measure(size)

    return command


def test_the_process_is_told_when_a_command_has_loaded_what_it_works_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = declare(
        tmp_path, monkeypatch, "import click\ndef measure(size):\n    click.echo(f'size {size}')\n"
    )
    loaded = []
    run = click.testing.CliRunner().invoke
    assert "Measure something." in run(command, ["--help"], obj=lambda: loaded.append("some_work")).output
    assert "some_work" not in sys.modules
    assert not loaded
    assert run(command, ["--size", "3"], obj=lambda: loaded.append("some_work")).output == "size 3\n"
    assert loaded == ["some_work"]

"""Files of commands import little: what a command works with is loaded when it runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
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
# Help, an error of usage and a completion in a fresh process.
LOOK = """
import importlib, sys
import click
from click.shell_completion import ShellComplete
module, attribute, heavy, *words = sys.argv[1:]
main = getattr(importlib.import_module(module), attribute)
def look(*arguments):
    try:
        main([*words, *arguments], standalone_mode=False)
    except click.UsageError as error:
        print(error.format_message())
    loaded = sorted(set(heavy.split(",")) & set(sys.modules))
    assert not loaded, f"{arguments} loads {', '.join(loaded)}"
look("--help")
look("--no-such-option")
print([item.value for item in ShellComplete(main, {}, "mm2", "_MM2_COMPLETE").get_completions(words, "--js")])
look("--help")
"""


def commands() -> Iterator[tuple[str, click.Command]]:
    for program, (module, attribute) in PROGRAMS.items():
        root = getattr(__import__(module, fromlist=[attribute]), attribute)
        if isinstance(root, click.Group):
            context = click.Context(root)
            yield from (
                (f"{program} {name}", root.get_command(context, name)) for name in root.list_commands(context)
            )
        else:
            yield program, root


def look(line: str, *, heavy: tuple[str, ...] = HEAVY) -> subprocess.CompletedProcess[str]:
    program, *words = line.split()
    return subprocess.run(
        [sys.executable, "-c", LOOK, *PROGRAMS[program], ",".join(heavy), *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("line", [line for line, _ in commands()])
def test_help_errors_of_usage_and_completion_load_no_heavy_library(line: str) -> None:
    done = look(line)
    assert done.returncode == 0, done.stderr
    assert "No such option" in done.stdout
    assert "['--json']" in done.stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_list_of_known_mistakes_loads_no_torch(options: tuple[str, ...]) -> None:
    listing = [sys.executable, "-X", "importtime", "-m", "compare.diagnosis", "--list", *options]
    done = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "gate_up_swapped" in done.stdout
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    # Tables are drawn by rich.
    assert loaded & set(HEAVY) <= {"rich"}


def test_library_that_help_loads_is_named() -> None:
    assert "AssertionError: ('--help',) loads click" in look("mm2-split memory", heavy=("click",)).stderr


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

"""Files of commands import little: what a command works with is loaded when it runs, without collections of garbage."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from pathlib import Path

import click
import click.testing
import pytest

from minimax_tools.command_line.console import Mm2Command, loading
from minimax_tools.machine.importing import importing

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
commands = [[]]
if isinstance(main, click.Group):
    look("--help")
    assert not [name for name in sys.modules if ".commands." in name], "the help of a group loads a command"
    commands = [[name] for name in main.list_commands(click.Context(main))]
for words in commands:
    look(*words, "--help")
    look(*words, "--no-such-option")
    completed = ShellComplete(main, {}, "mm2", "_MM2_COMPLETE").get_completions(words, "--js")
    assert [item.value for item in completed] == ["--json"]
    look(*words, "--help")
look("--help")
"""


def look(program: str, *, heavy: tuple[str, ...] = HEAVY) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", LOOK, *PROGRAMS[program], ",".join(heavy)]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)


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
    assert "AssertionError: ('--help',) loads click" in found


def test_the_process_is_told_when_a_command_has_loaded_what_it_works_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_work.py").write_text(
        "import click\ndef measure(size):\n    click.echo(f'size {size}')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_work", raising=False)

    @click.command(cls=Mm2Command)
    @click.option("--size", type=int)
    def command(size: int) -> None:
        """Measure something."""
        with loading():
            from some_work import measure

        measure(size)

    loaded: list[str] = []

    def run(*words: str) -> str:
        return click.testing.CliRunner().invoke(command, words, obj=lambda: loaded.append("some_work")).output

    assert "Measure something." in run("--help")
    assert "some_work" not in sys.modules
    assert not loaded
    assert run("--size", "3") == "size 3\n"
    assert loaded == ["some_work"]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A library that is imported anew, and says whether garbage was collected meanwhile."""
    (tmp_path / "mm2_new_library.py").write_text("import gc\nis_collecting = gc.isenabled()\nvalues = [[]]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mm2_new_library", raising=False)
    return "mm2_new_library"


def test_nothing_is_collected_while_a_library_is_imported_nor_is_the_library_looked_at_later(
    library: str,
) -> None:
    num_frozen = gc.get_freeze_count()
    with importing():
        module = importlib.import_module(library)
    assert not module.is_collecting
    assert gc.isenabled()
    assert gc.get_freeze_count() > num_frozen
    assert not any(found is module.values for found in gc.get_objects())


def test_a_block_that_imports_nothing_freezes_nothing() -> None:
    num_frozen = gc.get_freeze_count()
    made: list[object] = [[]]
    with importing():
        pass
    # What was frozen before may be gone meanwhile.
    assert gc.get_freeze_count() <= num_frozen
    assert any(found is made for found in gc.get_objects())


def test_collections_that_were_off_stay_off_and_an_error_puts_them_on_again() -> None:
    with pytest.raises(ImportError), importing():
        importlib.import_module("mm2_no_such_library")
    assert gc.isenabled()
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

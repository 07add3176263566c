"""`bench_torture.py`: a few checks of each part that damages files, and readers that the parts must count as broken."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import sys
from pathlib import Path

import click
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from torture.hostile_json import HostileFile, check_mutation, find_fault, hostile_files
from torture.hostile_pickles import find_fault as find_pickle_fault
from torture.hostile_text import find_controls
from torture.hostile_world import HostileWorld, run_command
from torture.mutations import (
    Leniency,
    Mutation,
    find_places,
    mutate_place,
    mutate_randomly,
    mutate_systematically,
    mutate_whole,
)
from torture.tally import Tally
from torture.unreadable_dumps import DAMAGES

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.errors import UsageError
from neuron.cli import main as mm2_test


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> HostileWorld:
    return HostileWorld.make(tmp_path_factory.mktemp("torture") / "world")


def test_a_sample_of_mutations_of_every_kind_of_file_is_refused_by_name(
    world: HostileWorld, tmp_path: Path
) -> None:
    tally = Tally(promise="")
    draw = random.Random(0)
    for file in hostile_files(world, tmp_path):
        # Reading of these takes a run of a layer.
        if file.name in ("token ids", "prompts"):
            continue
        content = file.read_text()
        mutations = [*mutate_randomly(content, 1, draw), *draw.sample(list(mutate_whole(content)), 2)]
        if file.is_json:
            value = json.loads(content)
            keys = draw.choice(list(find_places(value)))
            mutations += draw.sample(list(mutate_place(value, keys, file.leniency)), 5)
        for mutation in mutations:
            check_mutation(tally, file, mutation)
    assert tally.num_checks > 150
    assert tally.broken == []


@click.command(cls=Mm2Command)
@click.argument("path", type=click.Path(path_type=Path))
def careless(path: Path) -> None:
    """Read a number without a check."""
    number = json.loads(path.read_text()).get("number", 0)
    if not isinstance(number, int | float):
        raise UsageError("the number is wrong")
    click.echo(f"PASS {number:.0f}")


def test_reader_that_does_not_check_is_counted_as_broken(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"number": 1}')
    file = HostileFile(name="record", path=path, command=careless, words=(path,))
    tally = Tally(promise="")
    for mutation in mutate_systematically({"number": 1}, Leniency()):
        check_mutation(tally, file, mutation)
    words = "\n".join(tally.broken)
    assert "number is true: exit code 0, although the value is wrong" in words
    assert "number is missing: exit code 0" in words
    assert "number is there twice: exit code 0" in words
    assert "number is text: record.json is not named" in words
    assert "number is deep lists: no typed error" in words
    assert path.read_text() == '{"number": 1}'


def test_value_that_may_be_anything_is_spared(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("{}")
    file = HostileFile(name="record", path=path, command=careless, words=(path,))
    harmless = Mutation(description="", content=b'{"other": true}', must_be_refused=False)
    assert find_fault(file, harmless, run_command(careless, path)) is None


class _Makes:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._mark),)


@click.command(cls=Mm2Command)
@click.argument("path", type=click.Path(path_type=Path))
def trusting(path: Path) -> None:
    """Load a pickle as Python does."""
    pickle.loads(path.read_bytes())


def test_reader_that_runs_a_pickle_is_counted_as_broken(tmp_path: Path) -> None:
    path, mark = tmp_path / "value.bin", tmp_path / "mark"
    path.write_bytes(pickle.dumps(_Makes(mark)))
    assert find_pickle_fault(run_command(trusting, path), path, mark) == "its code ran"


def test_control_characters_are_found() -> None:
    assert find_controls("a line\n\tand ✅ another") == ""
    assert find_controls("\x1b[31mred\x07\u202e") == ascii("\x07\x1b\u202e")


@pytest.mark.parametrize("tool", ["nxdi", "vllm-neuron", "msprobe", "sglang"])
@pytest.mark.parametrize("way", DAMAGES)
def test_what_cannot_be_read_of_a_dump_is_named(
    world: HostileWorld, tmp_path: Path, tool: str, way: str
) -> None:
    if way == "folder without access" and os.geteuid() == 0:
        pytest.skip("nothing is denied to root")
    dump = Path(shutil.copytree(world.dump(tool), tmp_path / "dump"))
    named = DAMAGES[way](next(dump.rglob("*.pt")), dump)
    outcome = run_command(mm2_test, "show", dump, "--quiet")
    assert outcome.exit_code == 3
    assert named.name in outcome.one_line

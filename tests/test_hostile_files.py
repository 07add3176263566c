"""Files of any content end in an error that says what is wrong, never in a traceback: drawn damage."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest

from compare.cli import main as mm2_compare
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.cli import mm2_split
from neuron.cli import main as mm2_test

NUM_DRAWS = 8  # of values, and of bytes, for each file
WRONG = (
    *("null", "true", "3", "1.5", '"1"', "[]", '[["1"]]', '{"a": 1}', "NaN", "1e999", "-9223372036854775808"),
    *("1" + "0" * 400, "[" * 100_000 + "]" * 100_000, '"\\ud800"', '"\\u0000"', '"../../etc"'),
)
MARK = "@mutated@"
# The words for an exception that no code foresaw.
UNEXPECTED = re.compile(r"unexpected [A-Z]\w*:|--debug for the traceback")
# Each file, below the world's folder, with the command that reads it.
READERS: dict[str, tuple[click.Command, tuple[str, ...]]] = {
    "golden/manifest.json": (mm2_compare, ("--golden", "golden", "--run", "run", "--model", "toy")),
    "run/manifest.json": (mm2_test, ("show", "run")),
    "toy/config.json": (mm2_split, ("plan", "--model", "toy", "--node", "a:memory=1GB")),
    "toy/model.safetensors.index.json": (mm2_split, ("memory", "--model", "toy")),
    "plan.json": (mm2_split, ("verify", "--plan", "plan.json", "--slices", "slices")),
    "slices/a/slice.json": (mm2_split, ("verify", "--plan", "plan.json", "--slices", "slices")),
    "limits.yaml": (mm2_compare, ("--golden", "golden", "--run", "run", "--criteria", "limits.yaml")),
}


SIZES = ("--num-hidden-layers", "2", "--vocab-size", "300", "--hidden-size", "64", "--num-local-experts", "8")
SIDES = ("--model", "toy", "--golden", "golden", "--backend", "cpu")
NODES = ("--node", "a:memory=1GB", "--node", "b:memory=1GB")
# What writes the files, in this order.
WRITERS: tuple[tuple[click.Command, tuple[str, ...]], ...] = (
    (
        mm2_split,
        ("synthesize", "--output", "toy", *SIZES, "--num-experts-per-tok", "2", "--shard-size", "1MB"),
    ),
    (mm2_gpu, ("extract-all", "--model", "toy", "--seq-len", "12,7", "--output-dir", "golden")),
    (mm2_test, ("sweep", *SIDES, "--output-dir", "run")),
    (mm2_split, ("plan", "--model", "toy", *NODES, "--output", "plan.json")),
    (mm2_split, ("extract", "--plan", "plan.json", "--all-nodes", "--output", "slices")),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a small model and its golden, a run, a plan and slices; the working folder meanwhile."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command, words in WRITERS:
            result = invoke(command, words)
            assert result.exit_code == 0, result.output
        shutil.copy(Path(__file__).parents[1] / "compare/limits/calibration.yaml", "limits.yaml")
        yield folder


@pytest.mark.parametrize("file", READERS)
def test_damaged_file_ends_in_an_error_that_says_what_is_wrong(world: Path, file: str) -> None:
    path, (command, words) = world / file, READERS[file]
    whole = path.read_bytes()
    assert invoke(command, words).exit_code == 0, invoke(command, words).output
    draw = random.Random(file)
    try:
        for damage, content in (*damaged_values(whole, draw), *damaged_bytes(whole, draw)):
            path.write_bytes(content)
            result = invoke(command, words)
            told = f"{damage}: exit code {result.exit_code}: {result.output[-600:]} {result.exception!r}"
            assert result.exception is None or isinstance(result.exception, SystemExit), told
            assert result.exit_code in (0, 1, 2, 3), told
            assert not UNEXPECTED.search(" ".join(result.output.split())), told
            if content != whole and damage.startswith("the file"):
                assert result.exit_code != 0, told
                assert path.name in "".join(result.output.split()), told
    finally:
        path.write_bytes(whole)


def invoke(command: click.Command, words: tuple[str, ...]) -> click.testing.Result:
    return click.testing.CliRunner().invoke(command, [*words, "--quiet"])


def damaged_values(whole: bytes, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield JSON with one value replaced by a wrong one."""
    try:
        value = json.loads(whole)
    except ValueError:
        return
    places = list(find_places(value))
    for _ in range(NUM_DRAWS):
        keys, wrong = draw.choice(places), draw.choice(WRONG)
        copy = json.loads(whole)
        holder: Any = copy
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = MARK
        yield f"{keys} is {wrong[:30]}", json.dumps(copy).replace(json.dumps(MARK), wrong).encode()


def find_places(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value; of a long list or object, to the first ten."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[:10]:
        yield (*keys, key)
        yield from find_places(item, (*keys, key))


def damaged_bytes(whole: bytes, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield bytes that are cut off, no text, or changed at a drawn place."""
    yield "the file is empty", b""
    yield "the file is half", whole[: len(whole) // 2]
    yield "the file is no text", b"\xff\xfe" + whole
    yield "the file is zero bytes", bytes(4096)
    for _ in range(NUM_DRAWS):
        start = draw.randrange(len(whole))
        stop = start + draw.randrange(40)
        piece = draw.choice((b"", b"null", b"-1", b'"', b"{", b"]", b"\0", b"\xf0", b"[[[[", b"9" * 30))
        yield f"bytes {start} to {stop} are {piece!r}", whole[:start] + piece + whole[stop:]

"""Sides as a command's options name them: whose layout --map and --format are, and which layers are meant."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest

from compare.options import NamedSides, layers_options, sides_options
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.checkpoint.shard_files import is_cached
from minimax_tools.dumps.opening import DumpReading
from minimax_tools.errors import CaptureError, UsageError

OWN = DumpReading(format="msprobe")


def folder(path: Path, *, is_own: bool) -> Path:
    path.mkdir()
    if is_own:
        (path / MANIFEST_NAME).write_text("{}")
    return path


def named(captures: Path, golden: Path | None, run: Path | None, **readings: DumpReading) -> NamedSides:
    default = {"reading": DumpReading(), "golden_reading": DumpReading(), "run_reading": DumpReading()}
    return NamedSides(golden=golden, run=run, captures=captures, **{**default, **readings})


class TestReadings:
    @pytest.mark.parametrize(
        ("golden", "run", "own", "words"),
        [
            (True, True, (), "mm2 wrote both sides"),
            (False, False, (), "which side --format or --map is meant for cannot be told"),
            (False, True, ("golden_reading",), "which side --format or --map is meant for cannot be told"),
            (True, False, ("run_reading",), "which side --format or --map is meant for cannot be told"),
        ],
    )
    def test_layout_that_is_of_no_side_or_may_be_of_either_is_refused(
        self, tmp_path: Path, golden: bool, run: bool, own: tuple[str, ...], words: str
    ) -> None:
        """Sides of which mm2 wrote the golden, or the run, or both."""
        folders = folder(tmp_path / "golden", is_own=golden), folder(tmp_path / "run", is_own=run)
        sides = named(tmp_path, *folders, reading=OWN, **dict.fromkeys(own, OWN))
        with pytest.raises(UsageError, match=words):
            sides.open()

    def test_layout_goes_to_the_side_that_mm2_did_not_write(self, tmp_path: Path, golden: Path) -> None:
        dump = folder(tmp_path / "dump", is_own=False)
        for pair in ((golden, dump), (dump, golden)):
            with pytest.raises(CaptureError, match=f"msprobe.*{dump}|{dump}.*msprobe"):
                named(tmp_path, *pair, reading=OWN).open()

    def test_missing_side_is_the_newest_capture(self, tmp_path: Path) -> None:
        captures = tmp_path / "captures"
        for golden, run, side in ((None, tmp_path, "gpu_reference"), (tmp_path, None, "neuron")):
            with pytest.raises(CaptureError, match=f"no capture under {captures}/{side}"):
                named(captures, golden, run).open()


def run(options: list[str]) -> tuple[NamedSides, str | None]:
    found: list[tuple[NamedSides, str | None]] = []

    @click.command()
    @sides_options
    @layers_options
    def command(sides: NamedSides, layer_pattern: str | None) -> None:
        found.append((sides, layer_pattern))

    result = click.testing.CliRunner().invoke(command, options, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return found[0]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ([], None),
        (["--layer", "7"], "layer_7"),
        (["--layer", "07"], "layer_7"),
        (["--layer", "layer_7"], "layer_7"),
        (["--layer-pattern", "layer_1*"], "layer_1*"),
    ],
)
def test_layers_are_named_by_number_name_or_pattern(options: list[str], pattern: str | None) -> None:
    assert run(options)[1] == pattern


def test_layer_and_pattern_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="--layer and --layer-pattern were both given"):
        run(["--layer", "7", "--layer-pattern", "layer_*"])


def test_layout_options_are_given_back_as_they_were_taken(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text("sites:\n  moe_delta: layers.{layer}.mlp\n")
    options = ["--golden-format", "msprobe", "--run-map", str(tmp_path / "map.yaml")]
    assert list(run(options)[0].reading_arguments) == options
    assert run(["--format", "nxdi"])[0].reading_arguments == ("--format", "nxdi")
    assert run([])[0].reading_arguments == ()


class TestReadingAhead:
    """Layers that the run holds come into the page cache while a command's options are read."""

    @pytest.fixture
    def sides(self, tmp_path: Path) -> list[Path]:
        """A golden of two layers and a run of the second, forgotten by the system."""
        for name, layers in (("golden", (0, 1)), ("run", (1,))):
            (tmp_path / name).mkdir()
            for layer in layers:
                (tmp_path / name / f"layer_{layer}.safetensors").write_bytes(os.urandom(1_000_000))
        self.forget(tmp_path)
        if any(self.cached(tmp_path).values()):
            pytest.skip("this file system keeps files in memory, or does not tell whether it does")
        # A look fetches what it looked at.
        self.forget(tmp_path)
        return [tmp_path / "golden", tmp_path / "run"]

    def forget(self, folder: Path) -> None:
        for path in folder.rglob("*.safetensors"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def cached(self, folder: Path, pattern: str = "*.safetensors") -> dict[str, bool]:
        found = {}
        for path in sorted(folder.rglob(pattern)):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                found[str(path.relative_to(folder))] = is_cached(file.fileno(), 0, 1_000_000)
        return found

    def cached_after(self, options: list[str], folder: Path, *, awaited: str = "") -> dict[str, bool]:
        """Tell what is cached once the files `awaited`, a pattern, are; a look at any other fetches that one."""
        run(options)
        for thread in threading.enumerate():
            if thread.name == "mm2-read-ahead":
                thread.join(60)
        # The system was asked; the disk may still be at it.
        deadline = time.monotonic() + 60
        while awaited and not all(self.cached(folder, awaited).values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.cached(folder)

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_layers_of_the_run_are_read_of_both_sides(self, sides: list[Path], order: Any) -> None:
        words = [["--golden", str(sides[0])], ["--run", str(sides[1])]]
        cached = self.cached_after([*words[order[0]], *words[order[1]]], sides[0].parent, awaited="layer_1*")
        assert cached == {
            "golden/layer_0.safetensors": False,
            "golden/layer_1.safetensors": True,
            "run/layer_1.safetensors": True,
        }

    def test_nothing_is_read_if_layers_are_chosen(self, sides: list[Path]) -> None:
        words = ["--golden", str(sides[0]), "--run", str(sides[1]), "--layer", "1"]
        assert not any(self.cached_after(words, sides[0].parent).values())

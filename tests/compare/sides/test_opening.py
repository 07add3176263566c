"""Sides as a command's options name them: whose layout --map and --format are, and which layers are meant."""

from __future__ import annotations

from pathlib import Path

import click
import click.testing
import pytest

from compare.options import NamedSides, layers_options, sides_options
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.dumps.opening import DumpReading
from minimax_tools.errors import CaptureError, UsageError

OWN = DumpReading(format="msprobe")


def folder(path: Path, *, is_own: bool) -> Path:
    path.mkdir()
    if is_own:
        (path / MANIFEST_NAME).write_text("{}")
    return path


class TestReadings:
    def named(self, tmp_path: Path, *, golden: bool, run: bool, **readings: DumpReading) -> NamedSides:
        """Sides of which mm2 wrote the golden, or the run, or both."""
        default = {"reading": DumpReading(), "golden_reading": DumpReading(), "run_reading": DumpReading()}
        return NamedSides(
            golden=folder(tmp_path / "golden", is_own=golden),
            run=folder(tmp_path / "run", is_own=run),
            captures=tmp_path,
            **{**default, **readings},
        )

    def test_layout_of_a_dump_is_refused_if_mm2_wrote_both_sides(self, tmp_path: Path) -> None:
        sides = self.named(tmp_path, golden=True, run=True, reading=OWN)
        with pytest.raises(UsageError, match="mm2 wrote both sides"):
            sides.open()

    @pytest.mark.parametrize(
        ("golden", "run", "own"),
        [(False, False, None), (False, True, "golden_reading"), (True, False, "run_reading")],
    )
    def test_layout_that_may_be_of_either_side_is_refused(
        self, tmp_path: Path, golden: bool, run: bool, own: str | None
    ) -> None:
        readings = {} if own is None else {own: OWN}
        sides = self.named(tmp_path, golden=golden, run=run, reading=OWN, **readings)
        with pytest.raises(UsageError, match="which side --format or --map is meant for cannot be told"):
            sides.open()

    def test_layout_goes_to_the_side_that_mm2_did_not_write(self, tmp_path: Path, golden: Path) -> None:
        dump = folder(tmp_path / "dump", is_own=False)
        for pair in ((golden, dump), (dump, golden)):
            sides = NamedSides(
                golden=pair[0],
                run=pair[1],
                captures=tmp_path,
                reading=OWN,
                golden_reading=DumpReading(),
                run_reading=DumpReading(),
            )
            with pytest.raises(CaptureError, match=f"msprobe.*{dump}|{dump}.*msprobe"):
                sides.open()


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


def test_layout_options_are_given_back_as_they_were_taken(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text("sites:\n  moe_delta: layers.{layer}.mlp\n")
    options = ["--golden-format", "msprobe", "--run-map", str(tmp_path / "map.yaml")]
    assert list(run(options)[0].reading_arguments) == options
    assert run(["--format", "nxdi"])[0].reading_arguments == ("--format", "nxdi")
    assert run([])[0].reading_arguments == ()

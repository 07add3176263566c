"""Options of the commands that judge: --criteria with its limits, --metrics, --verbose and --report-path.

NamedSides: the two sides of a comparison as a command's options name them; and the options for its layers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from minimax_tools.capture.store import (
    DEVICE_SIDE,
    GOLDEN_SIDE,
    files_of_layers,
    newest_capture,
    stored_layers,
)
from minimax_tools.command_line.options import (
    CapturePath,
    RenamedOption,
    captures_option,
    complete_captures,
    grouped_as,
    reading_options,
    stack_options,
)
from minimax_tools.errors import UsageError, did_you_mean
from minimax_tools.machine.files import read_ahead

if TYPE_CHECKING:
    from compare.limits.criteria import Criteria
    from minimax_tools.capture.source import CaptureSource
    from minimax_tools.dumps.opening import DumpReading


# Of each side, before anything is judged. A layer of 4 096 tokens takes 1.2 GB of a golden.
_MOST_BYTES_AHEAD = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSides:
    """The two sides of a comparison, as a user named them."""

    golden: Path | None  # the golden; None for the newest under `captures`
    run: Path | None  # the port's run; None for the newest under `captures`
    captures: Path  # folder of all captures
    reading: DumpReading  # the layout of whichever side mm2 did not write
    golden_reading: DumpReading  # the golden's layout
    run_reading: DumpReading  # the run's layout

    def open(self) -> tuple[CaptureSource, CaptureSource]:
        """Open the golden and the run, in that order, whichever tool wrote them.

        Raises:
            CaptureError: A directory is missing, holds no capture, or holds a damaged one.
            IncomparableError: Another tool's dump is of other prompts than the other side.
            UsageError: A --map file is wrong, or it cannot be told which side --map or --format is meant for.
        """
        from minimax_tools.dumps.opening import open_sides

        golden = self.golden or newest_capture(self.captures, GOLDEN_SIDE)
        run = self.run or newest_capture(self.captures, DEVICE_SIDE)
        golden_reading, run_reading = self._assign_readings(golden, run)
        return open_sides(golden, run, reference_reading=golden_reading, target_reading=run_reading)

    @property
    def reading_arguments(self) -> tuple[str, ...]:
        """The options that name the layout of either side, as a command takes them."""
        readings = {"": self.reading, "golden-": self.golden_reading, "run-": self.run_reading}
        return tuple(
            word
            for side, reading in readings.items()
            for option, value in ((f"--{side}format", reading.format), (f"--{side}map", reading.names.path))
            if value is not None
            for word in (option, str(value))
        )

    def _assign_readings(self, golden: Path, run: Path) -> tuple[DumpReading, DumpReading]:
        """Return the layout of each side; --format and --map go to the one that is not mm2's own."""
        if self.reading.is_default:
            return self.golden_reading, self.run_reading
        from minimax_tools.dumps.opening import is_others

        # Whether each side is another tool's dump.
        are_foreign = (is_others(golden), is_others(run))
        if are_foreign == (False, False):
            raise UsageError(
                "--format and --map are for a dump of another tool, and mm2 wrote both sides",
                next_step="Leave them out.",
            )
        if are_foreign == (True, False) and self.golden_reading.is_default:
            return self.reading, self.run_reading
        if are_foreign == (False, True) and self.run_reading.is_default:
            return self.golden_reading, self.reading
        raise UsageError(
            "which side --format or --map is meant for cannot be told",
            expected="one side that another tool wrote, and no options of its own for it",
            next_step="Use --golden-format and --golden-map, --run-format and --run-map.",
        )


def _begin_to_read(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Have the system read the first layers of both sides while libraries are loaded, which takes seconds.

    It begins with the second of the two options, and returns `value`.
    """
    given = context.params | {parameter.name: value}
    golden, run = given.get("golden"), given.get("run")
    # An address has no folder yet. Of a few layers, nothing is known here.
    is_of_all = not (given.get("layer") or given.get("layer_pattern"))
    if is_of_all and isinstance(golden, Path) and isinstance(run, Path):
        # What cannot be read is said when the sides are opened.
        with suppress(OSError):
            layers = stored_layers(run)
            for side in (golden, run):
                read_ahead(files_of_layers(side, layers, most_bytes=_MOST_BYTES_AHEAD))
    return value


sides_options = stack_options(
    click.option(
        "--golden",
        "--gpu-path",
        "golden",
        cls=RenamedOption,
        type=CapturePath(),
        callback=_begin_to_read,
        shell_complete=complete_captures(GOLDEN_SIDE),
        help="Golden capture. Default: the newest under --captures.",
    ),
    click.option(
        "--run",
        "--neuron-path",
        "run",
        cls=RenamedOption,
        type=CapturePath(),
        callback=_begin_to_read,
        shell_complete=complete_captures(DEVICE_SIDE),
        help="Capture of the port's run, or another tool's dump of it. Default: the newest under --captures.",
    ),
    captures_option,
    reading_options(whose="the side that mm2 did not write"),
    reading_options("golden-", whose="the golden", old_side="gpu-"),
    reading_options("run-", whose="the run", old_side="neuron-"),
    # The command gets the options above as one argument, `sides`.
    grouped_as("sides", NamedSides),
)


def _read_pattern(layer: str | None, layer_pattern: str | None) -> str | None:
    """Return the pattern of the layers' names; None if none was given. `--layer 7` and `--layer 07` mean `layer_7`.

    Raises:
        UsageError: Both options were given.
    """
    if layer is not None and layer_pattern is not None:
        raise UsageError("--layer and --layer-pattern were both given", next_step="Use one of them.")
    if layer is not None and layer.isdecimal():
        return f"layer_{int(layer)}"
    return layer_pattern if layer is None else layer


layers_options = stack_options(
    # Both are read before the sides, whose first layers are read ahead without them.
    click.option(
        "--layer",
        metavar="layer_0",
        is_eager=True,
        help="Name or number of the only layer to look at.",
    ),
    click.option(
        "--layer-pattern",
        is_eager=True,
        metavar="'layer_*'",
        help="Names of the layers to look at. Default: all layers; in mm2-diagnose those that the comparison blames.",
    ),
    grouped_as("layer_pattern", _read_pattern),
)


_NAMES = ("noise", "classic")
_SUFFIXES = (".yaml", ".yml")


def _read_criteria(
    *,
    criteria_name: str,
    max_abs_diff: float | None,
    mean_abs_diff: float | None,
    similarity_percentage: float | None,
    cosine_similarity: float | None,
    pearson_correlation: float | None,
    rtol: float,
    atol: float,
) -> Criteria:
    """Build criteria from the values of `criteria_options`.

    Raises:
        UsageError: The criteria are unknown, their file is wrong, or a classic limit was given with other criteria.
    """
    from compare.limits.criteria import ClassicLimits, Criteria
    from compare.limits.limits_file import read_limits

    options = {
        "max_abs_diff": max_abs_diff,
        "mean_abs_diff": mean_abs_diff,
        "similarity_percentage": similarity_percentage,
        "cosine_similarity": cosine_similarity,
        "pearson_correlation": pearson_correlation,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if criteria_name == "classic":
        percentage = given.pop("similarity_percentage", None)
        if percentage is not None:
            given["close_fraction"] = percentage / 100.0
        return Criteria(name=criteria_name, classic=ClassicLimits(**given), rtol=rtol, atol=atol)
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(
            f"{names} belongs to the classic limits, and --criteria {criteria_name} judges by others",
            next_step="Add --criteria classic, or leave it out.",
        )
    if criteria_name == "noise":
        return Criteria(name=criteria_name, rtol=rtol, atol=atol)
    path = Path(criteria_name)
    if path.suffix not in _SUFFIXES:
        near = did_you_mean(criteria_name, _NAMES)
        raise UsageError(
            f"--criteria {criteria_name} is not known",
            expected=f"{' or '.join(_NAMES)}, or a file of limits that ends in {' or '.join(_SUFFIXES)}",
            next_step=f"{near} mm2-compare --criteria-template prints such a file.".strip(),
        )
    return Criteria(name=criteria_name, noise=read_limits(path), rtol=rtol, atol=atol)


_CLASSIC_OPTIONS: tuple[tuple[str, tuple[float, float | None], str], ...] = (
    ("max-abs-diff", (0, None), "largest absolute difference of a layer output.  [default: 0.01]"),
    ("mean-abs-diff", (0, None), "largest mean absolute difference.  [default: 0.001]"),
    (
        "similarity-percentage",
        (0, 100),
        "smallest percentage of close elements (see --rtol, --atol).  [default: 95]",
    ),
    ("cosine-similarity", (-1, 1), "smallest cosine similarity.  [default: 0.99]"),
    ("pearson-correlation", (-1, 1), "smallest Pearson correlation.  [default: 0.99]"),
)
criteria_options = stack_options(
    click.option(
        "--criteria",
        "criteria_name",
        metavar="noise|classic|FILE.yaml",
        default="noise",
        show_default=True,
        help="Judge by the golden's noise floor, by five classic limits on layer outputs, or by the noise floor with "
        "the limits in a file.",
    ),
    *(
        click.option(f"--{name}", type=click.FloatRange(*limits), help=f"Classic limit: {words}")
        for name, limits, words in _CLASSIC_OPTIONS
    ),
    click.option(
        "--metrics",
        "shows_metrics",
        is_flag=True,
        help="Show the five classic figures of every layer output beside ρ. Always on with --criteria classic.",
    ),
    click.option(
        "--rtol",
        type=click.FloatRange(min=0),
        default=DEFAULT_RTOL,
        show_default=True,
        help="Relative tolerance: an element is close within atol + rtol * |golden|.",
    ),
    click.option(
        "--atol",
        type=click.FloatRange(min=0),
        default=DEFAULT_ATOL,
        show_default=True,
        help="Absolute tolerance, see --rtol.",
    ),
    click.option(
        "--verbose",
        "is_verbose",
        is_flag=True,
        help="Show every layer, every site that fails, and statistics. Default: verdict, blame and what to do next.",
    ),
    # The command gets the values named in `_read_criteria` as one argument, `criteria`; --metrics and --verbose
    # stay their own.
    grouped_as("criteria", _read_criteria),
)
report_option = click.option(
    "--report-path",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Folder for a report: a page (report.html), Markdown, JUnit XML, text, JSON and CSV. Default: none.",
)

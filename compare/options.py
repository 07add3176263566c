"""Options of the commands that judge: --criteria with its limits, --metrics, --verbose and --report-path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from minimax_tools.command_line.options import grouped_as, stack_options
from minimax_tools.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from compare.limits.criteria import Criteria

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
    click.option(
        "--max-abs-diff",
        type=click.FloatRange(min=0),
        help="Classic limit: largest absolute difference of a layer output.  [default: 0.01]",
    ),
    click.option(
        "--mean-abs-diff",
        type=click.FloatRange(min=0),
        help="Classic limit: largest mean absolute difference.  [default: 0.001]",
    ),
    click.option(
        "--similarity-percentage",
        type=click.FloatRange(0, 100),
        help="Classic limit: smallest percentage of close elements (see --rtol, --atol).  [default: 95]",
    ),
    click.option(
        "--cosine-similarity",
        type=click.FloatRange(-1, 1),
        help="Classic limit: smallest cosine similarity.  [default: 0.99]",
    ),
    click.option(
        "--pearson-correlation",
        type=click.FloatRange(-1, 1),
        help="Classic limit: smallest Pearson correlation.  [default: 0.99]",
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

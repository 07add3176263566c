"""The options of every command that judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from compare.limits.criteria import DEFAULT_ATOL, DEFAULT_RTOL, ClassicLimits, Criteria
from compare.limits.limits_file import read_limits
from minimax_tools.command_line.options import stack_options
from minimax_tools.errors import UsageError

_NAMES = ("noise", "classic")
_LIMITS = (
    "max_abs_diff",
    "mean_abs_diff",
    "similarity_percentage",
    "cosine_similarity",
    "pearson_correlation",
)
_SUFFIXES = (".yaml", ".yml")

criteria_options = stack_options(
    click.option(
        "--criteria",
        "criteria_name",
        metavar="noise|classic|FILE.yaml",
        default="noise",
        show_default=True,
        help="Judge by the golden's noise floor, by the five classic limits on layer outputs, or by the noise with "
        "limits of your own.",
    ),
    click.option(
        "--max-abs-diff",
        type=click.FloatRange(min=0),
        help="Classic limit: largest absolute difference of an output.  [default: 0.01]",
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
        help="Show the five classic figures of every layer's output beside rho; always shown with --criteria classic.",
    ),
    click.option(
        "--rtol",
        type=click.FloatRange(min=0),
        default=DEFAULT_RTOL,
        show_default=True,
        help="An element is close within atol + rtol * |golden|.",
    ),
    click.option(
        "--atol",
        type=click.FloatRange(min=0),
        default=DEFAULT_ATOL,
        show_default=True,
        help="Absolute part of that tolerance.",
    ),
)


def read_criteria(options: dict[str, Any]) -> Criteria:
    """The options above as one value.

    Raises:
        UsageError: The criteria are not known, their file names what there is not, or a classic limit was given
            beside other criteria.
    """
    name, tolerances = options["criteria_name"], {"rtol": options["rtol"], "atol": options["atol"]}
    limits = _read_classic_limits(options)
    if name == "classic":
        return Criteria(name=name, classic=ClassicLimits(**limits), **tolerances)
    if limits:
        given = ", ".join(
            f"--{option.replace('_', '-')}" for option in _LIMITS if options[option] is not None
        )
        raise UsageError(
            f"{given} belongs to the classic limits, and --criteria {name} judges by others",
            next_step="Add --criteria classic, or leave it out.",
        )
    if name == "noise":
        return Criteria(name=name, **tolerances)
    path = Path(name)
    if path.suffix not in _SUFFIXES:
        raise UsageError(
            f"--criteria {name} is not known",
            expected=f"{' or '.join(_NAMES)}, or a file of limits that ends in {' or '.join(_SUFFIXES)}",
            next_step="mm2-compare --criteria-template prints such a file.",
        )
    return Criteria(name=name, noise=read_limits(path), **tolerances)


def _read_classic_limits(options: dict[str, Any]) -> dict[str, float]:
    """The limits that were given, by the field of `ClassicLimits`."""
    given = {name: options[name] for name in _LIMITS if options[name] is not None}
    if "similarity_percentage" in given:
        given["close_fraction"] = given.pop("similarity_percentage") / 100.0
    return given

"""The options of every command that judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from compare.criteria import DEFAULT_ATOL, DEFAULT_RTOL
from compare.judge import Criteria
from compare.limits_file import read_limits
from minimax_tools.errors import UsageError
from minimax_tools.options import stack_options

_NAMES = ("noise", "classic")
_SUFFIXES = (".yaml", ".yml")

criteria_options = stack_options(
    click.option(
        "--criteria",
        "criteria_name",
        metavar="noise|classic|FILE.yaml",
        default="noise",
        show_default=True,
        help="Judge by the golden's noise floor, by the five classic limits, or by the noise with limits of your own.",
    ),
    click.option("--rtol", type=click.FloatRange(min=0), default=DEFAULT_RTOL, show_default=True),
    click.option("--atol", type=click.FloatRange(min=0), default=DEFAULT_ATOL, show_default=True),
)


def read_criteria(options: dict[str, Any]) -> Criteria:
    """The options above as one value.

    Raises:
        UsageError: The criteria are neither, or their file names what there is not.
    """
    name, tolerances = options["criteria_name"], {"rtol": options["rtol"], "atol": options["atol"]}
    if name in _NAMES:
        return Criteria(name=name, **tolerances)
    path = Path(name)
    if path.suffix not in _SUFFIXES:
        raise UsageError(
            f"--criteria {name} is not known",
            expected=f"{' or '.join(_NAMES)}, or a file of limits that ends in {' or '.join(_SUFFIXES)}",
            next_step="mm2-compare --criteria-template prints such a file.",
        )
    return Criteria(name=name, noise=read_limits(path), **tolerances)

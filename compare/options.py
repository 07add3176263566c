"""The options of every command that judges."""

from __future__ import annotations

from typing import Any

import click

from compare.criteria import DEFAULT_ATOL, DEFAULT_RTOL
from compare.judge import Criteria
from minimax_tools.options import stack_options

criteria_options = stack_options(
    click.option(
        "--criteria",
        "criteria_name",
        type=click.Choice(["noise", "classic"]),
        default="noise",
        show_default=True,
        help="Judge by the golden's noise floor, or by the five classic limits.",
    ),
    click.option("--rtol", type=click.FloatRange(min=0), default=DEFAULT_RTOL, show_default=True),
    click.option("--atol", type=click.FloatRange(min=0), default=DEFAULT_ATOL, show_default=True),
)


def read_criteria(options: dict[str, Any]) -> Criteria:
    """The options above as one value."""
    return Criteria(name=options["criteria_name"], rtol=options["rtol"], atol=options["atol"])

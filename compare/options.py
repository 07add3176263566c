"""The options of every command that judges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from compare.criteria import DEFAULT_ATOL, DEFAULT_RTOL
from compare.judge import Criteria


def criteria_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--criteria`, `--rtol`, `--atol`."""
    decorators = [
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
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def read_criteria(options: dict[str, Any]) -> Criteria:
    """The options above as one value."""
    return Criteria(name=options["criteria_name"], rtol=options["rtol"], atol=options["atol"])

"""The option of every command that goes by a plan."""

from __future__ import annotations

from pathlib import Path

import click

plan_option = click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="The plan: a file that mm2-split plan wrote.",
)

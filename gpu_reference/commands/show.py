"""`mm2-gpu show`: what a capture holds, what was generated, and whether its files are as written."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import output_options, reading_options
from minimax_tools.command_line.remote_paths import CapturePath
from minimax_tools.command_line.work import done_by


@click.command(
    "show", cls=Mm2Command, epilog="\b\nExample: mm2-gpu show mm2-captures/gpu_reference/full_model"
)
@click.argument("directory", type=CapturePath())
@reading_options()
@output_options
@done_by("gpu_reference.commands.work.show", "show_golden")
def show_command() -> None:
    """Print what a capture holds: layers, sites, shapes and statistics, what was generated, and any damage.

    Exits with 3 where its files are not as they were written.
    """

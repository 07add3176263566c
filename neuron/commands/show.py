"""`mm2-test show`: what a saved run holds, and whether its files are as written."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import output_options, reading_options
from minimax_tools.command_line.remote_paths import CapturePath
from minimax_tools.command_line.work import done_by


@click.command("show", cls=Mm2Command, epilog="\b\nExample: mm2-test show mm2-captures/neuron/single_layer_0")
@click.argument("directory", type=CapturePath())
@reading_options()
@click.option("--map-template", is_flag=True, help="Print a --map file of the dump to fill in, and end.")
@output_options
@done_by("neuron.commands.work.show", "show_run")
def show_command() -> None:
    """Print what a saved run holds: layers, sites, shapes and statistics, and whether its files are as written.

    Exits with 3 if they are not.
    """

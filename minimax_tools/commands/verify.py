"""`mm2-split verify`: the proof that each node loads its own slice."""

from __future__ import annotations

from pathlib import Path

import click

from minimax_tools.command_line.console import DETAILED_LEVEL, Mm2Command
from minimax_tools.command_line.options import output_options
from minimax_tools.command_line.work import done_by
from minimax_tools.commands.options import newest_plan_option, plan_model_option
from minimax_tools.slices.layout import DEFAULT_FOLDER


@click.command("verify", cls=Mm2Command)
@newest_plan_option
@click.option(
    "--node", "nodes", multiple=True, metavar="NAME", help="Node to verify. Repeat for several. Default: all."
)
@plan_model_option
@click.option(
    "--slices",
    type=click.Path(path_type=Path, file_okay=False),
    help="Parent folder of the slices. Every byte in it is compared with the checkpoint. Default: none; without --plan "
    f"./{DEFAULT_FOLDER}, if it is there.",
)
@click.option(
    "--records",
    type=click.Path(path_type=Path, file_okay=False),
    help="Capture directory of a run, or its folder of read records. Verifies what each node read.",
)
@click.option("--verbose", is_flag=True, help=f"Show every section, as DEBUG={DETAILED_LEVEL} does.")
@output_options
@done_by("minimax_tools.commands.work.verify", "verify_slices")
def verify_command() -> None:
    """Prove that each node loads its own slice, that the slices make up the model, and that no byte is wrong.

    Exits with 1 if a verdict fails. Without --plan, the newest plan in this folder is verified, and of the nodes those
    that have a slice here.

    Example: mm2-split verify --plan plan.json --slices model_shards
    """

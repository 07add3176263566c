"""`mm2-split fetch`: the files or bytes of a hub's model that one node needs."""

from __future__ import annotations

from pathlib import Path

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import output_options
from minimax_tools.command_line.work import done_by
from minimax_tools.commands.options import plan_option
from minimax_tools.slices.layout import DEFAULT_FOLDER


@click.command("fetch", cls=Mm2Command, resumes=True)
@plan_option
@click.option("--node", required=True, metavar="NAME", help="Node whose slice is fetched.")
@click.option("--model", metavar="HUB_ID", help="Model on the hub. Default: the plan's.")
@click.option(
    "--byte-ranges",
    is_flag=True,
    help="Fetch only the bytes of the slice's tensors, and write the slice as mm2-split extract does.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Folder of the slice, with --byte-ranges. Default: ./{DEFAULT_FOLDER}/NODE.",
)
@output_options
@done_by("minimax_tools.commands.work.fetch", "fetch_node")
def fetch_command() -> None:
    """Fetch the files that hold a node's tensors into the hub's cache, or only the tensors' bytes.

    With DEBUG=11, the download sections of mm2-split verify --verbose are printed too.

    Example: mm2-split fetch --plan plan.json --node a100
    """

"""`mm2-split cache`: what was fetched from remote addresses and is kept on this machine."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import output_options, parse_size_option
from minimax_tools.command_line.work import done_by


@click.command("cache", cls=Mm2Command, epilog="\b\nExample: mm2-split cache --keep 200GB")
@click.option(
    "--keep",
    "keep_bytes",
    metavar="SIZE",
    callback=parse_size_option,
    help="Remove what was used least lately, until the cache takes at most SIZE, such as 200GB.",
)
@click.option("--clear", "clears", is_flag=True, help="Remove all that is at its address still.")
@output_options
@done_by("minimax_tools.commands.work.cache", "show_cache")
def cache_command() -> None:
    """List the goldens, runs and checkpoints that commands fetched from s3:// and hf:// addresses, with their sizes.

    Nothing is removed unless you ask for it. A run that could not be put at its address stays in any case: it is here
    alone. MM2_CACHE names the folder; ~/.cache/mm2 is the default. What comes from a hub lies in huggingface_hub's
    cache, and is linked here. Remove nothing while a command reads from it.
    """

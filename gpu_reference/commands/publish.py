"""`mm2-gpu publish`: a certified golden put where every porter can read it."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import captures_option, output_options
from minimax_tools.command_line.remote_paths import CapturePath
from minimax_tools.command_line.work import done_by


@click.command(
    "publish",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-gpu publish --golden GOLDEN --to hf://datasets/owner/minimax-m2-golden",
)
@click.option(
    "--golden",
    type=CapturePath(),
    help="Golden capture, certified. Default: the newest under --captures.",
)
@click.option(
    "--to",
    "address_text",
    required=True,
    metavar="s3://bucket/folder|hf://datasets/owner/name@revision",
    help="Address to put it at. A dataset is made if there is none, and is public then.",
)
@click.option(
    "--allow-uncertified", is_flag=True, help="Take a golden without a certificate, or with a partial one."
)
@click.option("--replace", "replaces", is_flag=True, help="Replace another capture at the address.")
@captures_option
@output_options
@done_by("gpu_reference.commands.work.publish", "publish")
def publish_command() -> None:
    """Put a certified golden at a remote address, with a card that says what made it.

    All tensors are checked first. The manifest comes last, so nobody reads a half. An interrupted command goes on where
    it stopped. Commands read the golden by its address: --golden s3://bucket/folder.
    """

"""`mm2-split synthesize`: a checkpoint of random numbers that behave like a trained model's."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import output_options
from minimax_tools.command_line.work import done_by
from minimax_tools.commands.options import (
    new_folder_option,
    shard_size_option,
    size_options,
    stored_dtype_option,
)
from minimax_tools.synthetic.toy_model import PRESETS

_DTYPES = {"fp8": "float8_e4m3fn", "bfloat16": "bfloat16", "float32": "float32"}


@click.command("synthesize", cls=Mm2Command)
@new_folder_option
@click.option(
    "--preset",
    "preset_name",
    type=click.Choice(list(PRESETS)),
    default="toy",
    show_default=True,
    help="Model that gives every size not chosen below.",
)
@size_options()
@stored_dtype_option("--dtype", _DTYPES, default="fp8")
@shard_size_option("at least four shards")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random numbers.")
@output_options
@done_by("minimax_tools.commands.work.synthesize", "synthesize_model")
def synthesize_command() -> None:
    """Write a checkpoint in the hub's layout whose random numbers behave like a trained model's.

    Example: mm2-split synthesize --output toy --num-hidden-layers 8
    """

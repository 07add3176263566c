"""`mm2-split synthesize`: a checkpoint of random numbers that behave like a trained model's."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from minimax_tools.command_line.console import Mm2Command, loading, print_json, print_text
from minimax_tools.command_line.options import output_options
from minimax_tools.commands.options import (
    new_folder_option,
    shard_size_option,
    size_options,
    stored_dtype_option,
)
from minimax_tools.errors import format_count
from minimax_tools.synthetic.toy_model import PRESETS

if TYPE_CHECKING:
    import torch


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
def synthesize_command(
    output: Path,
    preset_name: str,
    dtype: torch.dtype,
    shard_size_bytes: int | None,
    seed: int,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Write a checkpoint in the hub's layout whose random numbers behave like a trained model's.

    Example: mm2-split synthesize --output toy --num-hidden-layers 8
    """
    with loading():
        from minimax_tools.command_line.run_commands import make_golden
        from minimax_tools.synthetic.checkpoint import synthesize

    chosen = {name: size for name, size in sizes.items() if size is not None}
    model = replace(PRESETS[preset_name], **chosen)
    made = synthesize(output, model=model, dtype=dtype, shard_size_bytes=shard_size_bytes, seed=seed)
    following = (make_golden(str(made.folder)),)
    if as_json:
        print_json({**asdict(made), "folder": str(made.folder)}, next_commands=following)
    else:
        text = (
            f"{made.folder}: {format_count(made.num_tensors, 'tensor')} in "
            f"{format_count(made.num_shards, 'shard')}, {format_count(made.size_bytes, 'byte')} of tensors"
        )
        print_text(text, next_commands=following)

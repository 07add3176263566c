"""`mm2-split synthesize`: a checkpoint of random numbers that behave like a trained model's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from minimax_tools.command_line.console import Mm2Command, loading, print_json, print_text
from minimax_tools.command_line.options import output_options, read_dtype, stack_options
from minimax_tools.commands.options import shard_size_option
from minimax_tools.errors import format_count
from minimax_tools.model.families import FAMILIES
from minimax_tools.synthetic.toy_model import PRESETS

if TYPE_CHECKING:
    import torch


_DTYPES = {"fp8": "float8_e4m3fn", "bfloat16": "bfloat16", "float32": "float32"}
# Help for each size of the model. `hidden_size` is the field of SyntheticModel, and --hidden-size the option.
_SIZES = {
    "num_hidden_layers": "Number of layers",
    "hidden_size": "Width of the residual stream",
    "num_attention_heads": "Number of query heads",
    "num_key_value_heads": "Number of key and value heads",
    "head_dim": "Width of a head",
    "rotary_dim": "Rotated width of a head",
    "num_local_experts": "Number of experts",
    "num_experts_per_tok": "Number of experts per token",
    "intermediate_size": "Width of an expert",
    "vocab_size": "Number of token ids",
}
_size_options = stack_options(
    *(
        click.option(
            f"--{name.replace('_', '-')}",
            name,
            type=click.IntRange(min=1),
            help=f"{text}. Default: the preset's.",
        )
        for name, text in _SIZES.items()
    )
)


@click.command("synthesize", cls=Mm2Command)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder to write; absent or empty.",
)
@click.option(
    "--preset",
    "preset_name",
    type=click.Choice(list(PRESETS)),
    default="toy",
    show_default=True,
    help="Model that gives every size not chosen below: "
    + "; ".join(
        f"{family.toy_preset}, a toy of {family.title}, or {family.preset}, {family.preset_words}"
        for family in FAMILIES.values()
    )
    + ".",
)
@_size_options
@click.option(
    "--dtype",
    type=click.Choice(list(_DTYPES)),
    default="fp8",
    show_default=True,
    callback=lambda ctx, param, value: read_dtype(ctx, param, _DTYPES[value]),
    help="Stored dtype of linear layers.",
)
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
        from minimax_tools.capture.run_commands import make_golden
        from minimax_tools.synthetic.checkpoint import synthesize

    chosen = {name: size for name, size in sizes.items() if size is not None}
    model = PRESETS[preset_name].resized(**chosen)
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

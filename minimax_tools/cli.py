"""`mm2-split`: checkpoints made and taken apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from minimax_tools.command_line.console import Mm2Group, print_json
from minimax_tools.command_line.options import output_options, parse_size_option
from minimax_tools.commands.extract import extract_command
from minimax_tools.commands.fetch import fetch_command
from minimax_tools.commands.plan import plan_command
from minimax_tools.commands.train import train_command
from minimax_tools.commands.verify import verify_command
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import PRESETS

Command = TypeVar("Command", bound=Callable[..., Any])

_STORED_DTYPES = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}


def _parse_stored_dtype(_: click.Context, __: click.Parameter, value: str) -> torch.dtype:
    return _STORED_DTYPES[value]


def _quantity(name: str, text: str) -> Callable[[Command], Command]:
    return click.option(
        f"--{name.replace('_', '-')}", name, type=click.IntRange(min=1), help=f"{text}; else the preset's."
    )


@click.group(cls=Mm2Group)
def mm2_split() -> None:
    """Make checkpoints, and take them apart."""


@mm2_split.command("synthesize")
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="A new folder."
)
@click.option(
    "--preset",
    "preset_name",
    type=click.Choice(list(PRESETS)),
    default="toy",
    show_default=True,
    help="Where sizes start.",
)
@_quantity("num_hidden_layers", "Number of layers")
@_quantity("hidden_size", "Width of the residual stream")
@_quantity("num_attention_heads", "Number of query heads")
@_quantity("num_key_value_heads", "Number of key and value heads")
@_quantity("head_dim", "Width of a head")
@_quantity("rotary_dim", "How much of a head is rotated")
@_quantity("num_local_experts", "Number of experts")
@_quantity("num_experts_per_tok", "Number of experts a token takes")
@_quantity("intermediate_size", "Width of an expert")
@_quantity("vocab_size", "Number of token ids")
@click.option(
    "--dtype",
    type=click.Choice(list(_STORED_DTYPES)),
    default="fp8",
    show_default=True,
    callback=_parse_stored_dtype,
    help="How linear layers are stored.",
)
@click.option(
    "--shard-size",
    "shard_size_bytes",
    callback=parse_size_option,
    metavar="500MB|2GB",
    help="Most a shard holds; else at least four shards.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of every number.")
@output_options
def synthesize_command(
    output: Path,
    preset_name: str,
    dtype: torch.dtype,
    shard_size_bytes: int | None,
    seed: int,
    as_json: bool,
    **quantities: int | None,
) -> None:
    """Write a checkpoint in the hub's layout whose random numbers behave like a trained model's.

    Example: mm2-split synthesize --output toy --num-hidden-layers 8
    """
    given = {name: value for name, value in quantities.items() if value is not None}
    model = replace(PRESETS[preset_name], **given)
    made = synthesize(output, model=model, dtype=dtype, shard_size_bytes=shard_size_bytes, seed=seed)
    if as_json:
        print_json({**asdict(made), "folder": str(made.folder)})
    else:
        click.echo(
            f"{made.folder}: {made.num_tensors} tensors in {made.num_shards} shards, {made.size_bytes} bytes"
        )


mm2_split.add_command(train_command)
mm2_split.add_command(extract_command)
mm2_split.add_command(plan_command)
mm2_split.add_command(fetch_command)
mm2_split.add_command(verify_command)


def main() -> None:
    """Run `mm2-split`."""
    mm2_split(prog_name="mm2-split")

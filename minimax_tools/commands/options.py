"""Options that several commands of `mm2-split` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from minimax_tools.command_line.options import Command, parse_size_option

plan_option = click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="Plan file, written by mm2-split plan.",
)
newest_plan_option = click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Plan file, written by mm2-split plan. Default: the newest one in this folder.",
)
plan_model_option = click.option(
    "--model",
    metavar="FOLDER|HUB_ID|s3://…",
    help="Checkpoint: a folder, a hub id or s3://bucket/folder. Default: the plan's.",
)


def shard_size_option(default: str) -> Callable[[Command], Command]:
    """Return --shard-size, in bytes; the help names the default."""
    return click.option(
        "--shard-size",
        "shard_size_bytes",
        callback=parse_size_option,
        metavar="500MB|2GB",
        help=f"Largest size of a shard. Default: {default}.",
    )

"""Options that several commands of `mm2-split` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import click

from minimax_tools.command_line.options import Command, NamedDtype, parse_size_option, stack_options
from minimax_tools.synthetic.toy_model import SyntheticModel

# Help for each size of a synthetic model. `hidden_size` is the field of SyntheticModel, and --hidden-size the option.
_SIZES: Mapping[str, str] = MappingProxyType(
    {
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
)

new_folder_option = click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder to write; absent or empty.",
)
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


def stored_dtype_option(
    name: str, dtypes: Mapping[str, str], *, default: str
) -> Callable[[Command], Command]:
    """Return the option that chooses the dtype of linear layers on disk, as a torch.dtype.

    `dtypes` has torch's name of each dtype by the name that users give.
    """
    return click.option(
        name,
        type=click.Choice(list(dtypes)),
        default=default,
        show_default=True,
        callback=lambda _, __, value: NamedDtype(dtypes[value]),
        help="Stored dtype of linear layers.",
    )


def size_options(defaults: SyntheticModel | None = None) -> Callable[[Command], Command]:
    """Return an option for each size of a synthetic model.

    Args:
        defaults: Model with the default sizes; None if the command's preset gives them.
    """
    return stack_options(
        *(
            click.option(
                f"--{name.replace('_', '-')}",
                name,
                type=click.IntRange(min=1),
                default=None if defaults is None else getattr(defaults, name),
                show_default=defaults is not None,
                help=f"{text}." if defaults is not None else f"{text}. Default: the preset's.",
            )
            for name, text in _SIZES.items()
        )
    )

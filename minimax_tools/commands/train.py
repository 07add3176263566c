"""`mm2-split train`: a checkpoint of a small MiniMax-M2 trained on text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from minimax_tools.command_line.console import Mm2Command, loading
from minimax_tools.command_line.options import grouped_as, output_options
from minimax_tools.commands.options import new_folder_option, size_options, stored_dtype_option
from minimax_tools.synthetic.corpus import CORPORA
from minimax_tools.synthetic.toy_model import SyntheticModel

_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "float32": "float32"}
_DEFAULTS = SyntheticModel(num_hidden_layers=5, num_local_experts=16, intermediate_size=64, vocab_size=262)


@click.command("train", cls=Mm2Command)
@new_folder_option
@click.option(
    "--text",
    "texts",
    multiple=True,
    default=("prose",),
    show_default=True,
    metavar="NAME|FILE",
    help=f"Training text: {', '.join(CORPORA)}, or a UTF-8 file. Repeat for several.",
)
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(min=1),
    help="Number of training steps. Default: see --minutes.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Training time in minutes, instead of --steps. Default: 10.",
)
@size_options(_DEFAULTS)
@grouped_as("model", SyntheticModel)
@click.option("--batch-size", type=click.IntRange(min=1), default=4, show_default=True, help="Rows per step.")
@click.option("--seq-len", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens per row.")
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Highest learning rate of AdamW. Default: 0.5 / hidden size.",
)
@click.option(
    "--bias-rate",
    type=click.FloatRange(min=0),
    default=0.003,
    show_default=True,
    help="Largest change of an expert's correction bias per step.",
)
@click.option(
    "--massive-channels",
    "num_massive_channels",
    type=click.IntRange(min=0, max=16),
    default=0,
    show_default=True,
    help="Number of channels of the residual stream that start massive.",
)
@stored_dtype_option("--storage", _DTYPES, default="bf16")
@click.option(
    "--fp8-output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Second new folder, for the same model in block FP8. Default: none.",
)
@click.option(
    "--num-threads",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Training threads. Another number changes the last bits of the weights.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and rows.")
@output_options
def train_command(**options: Any) -> None:
    """Train a small MiniMax-M2 on text, and write a checkpoint with held-out prompts.

    transformers' model is trained in float32 on the CPU (extra golden). The same text, --steps, seed, torch version and
    number of threads give the same weights.

    Example: mm2-split train --output learned --text prose --minutes 10
    """
    with loading():
        from minimax_tools.commands.work.train import train_model

    train_model(**options)

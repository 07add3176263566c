"""`mm2-split train`: a checkpoint of a small MiniMax-M2 trained on text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import torch

from minimax_tools.command_line.capture_commands import make_golden
from minimax_tools.command_line.console import Mm2Command, print_json, print_text
from minimax_tools.command_line.options import grouped_as, output_options
from minimax_tools.commands.options import new_folder_option, size_options, stored_dtype_option
from minimax_tools.errors import format_count
from minimax_tools.synthetic.corpus import CORPORA
from minimax_tools.synthetic.learned import LearnedModel, train_checkpoint, training_record
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.training import TrainingOptions

_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "float32": torch.float32}
_DEFAULTS = SyntheticModel(num_hidden_layers=5, num_local_experts=16, intermediate_size=64, vocab_size=262)
_DEFAULT_MINUTES = 10.0
# The default learning rate times the hidden size: wider models need smaller steps.
_LEARNING_RATE_OF_WIDTH = 0.5


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
def train_command(
    *,
    output: Path,
    texts: tuple[str, ...],
    num_steps: int | None,
    minutes: float | None,
    model: SyntheticModel,
    batch_size: int,
    seq_len: int,
    learning_rate: float | None,
    bias_rate: float,
    num_massive_channels: int,
    storage: torch.dtype,
    fp8_output: Path | None,
    num_threads: int,
    seed: int,
    as_json: bool,
) -> None:
    """Train a small MiniMax-M2 on text, and write a checkpoint with held-out prompts.

    transformers' model is trained in float32 on the CPU (extra golden). The same text, --steps, seed, torch version and
    number of threads give the same weights.

    Example: mm2-split train --output learned --text prose --minutes 10
    """
    if num_steps is not None and minutes is not None:
        raise click.UsageError("--steps and --minutes exclude each other.")
    options = TrainingOptions(
        num_steps=num_steps,
        minutes=_DEFAULT_MINUTES if num_steps is None and minutes is None else minutes,
        batch_size=batch_size,
        seq_len=seq_len,
        learning_rate=learning_rate or _LEARNING_RATE_OF_WIDTH / model.hidden_size,
        bias_rate=bias_rate,
        seed=seed,
    )
    outputs = {output: storage}
    if fp8_output is not None:
        outputs[fp8_output] = torch.float8_e4m3fn
    with _threads(num_threads):
        learned = train_checkpoint(
            outputs, model=model, texts=texts, options=options, num_massive_channels=num_massive_channels
        )
        record = training_record(learned, model=model, options=options)
    folders = [str(folder) for folder in learned.folders]
    following = [make_golden(folder) for folder in folders]
    if as_json:
        print_json({"folders": folders, **record}, next_commands=following)
    else:
        print_text("\n".join(_describe(learned)), next_commands=following)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Set the number of torch's threads during the block."""
    number_before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(number_before)


def _describe(learned: LearnedModel) -> list[str]:
    """Return lines on the training, and on held-out text, which `rivals` compress without a model."""
    course, after = learned.course, learned.after
    lines = [
        f"{', '.join(str(folder) for folder in learned.folders)}: "
        f"{format_count(course.num_steps, 'step')}, {course.num_tokens} tokens, {course.duration_s:.0f} s",
        f"loss {course.loss:.3f} nats per token over the last steps",
        f"held-out text: {after.bits_per_byte:.3f} bits per byte "
        f"({learned.before.bits_per_byte:.2f} before training; unigrams {learned.rivals.unigram:.2f}, "
        f"lzma {learned.rivals.lzma:.2f})",
        f"with the experts of another token: {after.bits_per_byte_random_experts:.3f} bits per byte",
        "layer  load (1 is even)  bits of the token in an expert, before → after  of the next token",
    ]
    for index, (untrained, trained) in enumerate(zip(learned.before.layers, after.layers, strict=True)):
        low, high = trained.load_range
        lines.append(
            f"{index:5}  {low:.2f} to {high:.2f}      {untrained.token_information:.2f} → "
            f"{trained.token_information:.2f}  {untrained.next_token_information:.2f} → "
            f"{trained.next_token_information:.2f}"
        )
    return lines

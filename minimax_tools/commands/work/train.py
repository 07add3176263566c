"""`mm2-split train` at work: a model trained, and the course as text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import torch

from minimax_tools.capture.run_commands import make_golden
from minimax_tools.command_line.console import print_json, print_text
from minimax_tools.errors import format_count
from minimax_tools.synthetic.learned import LearnedModel, train_checkpoint, training_record
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.training import TrainingOptions

_DEFAULT_MINUTES = 10.0
# The default learning rate times the hidden size: wider models need smaller steps.
_LEARNING_RATE_OF_WIDTH = 0.5


def train_model(
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
    """Train a model, write its checkpoints, and print how it went."""
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

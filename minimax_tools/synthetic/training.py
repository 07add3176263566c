"""Training of a small MiniMax-M2: AdamW on next tokens. Only the load of the experts moves the router's bias.

With the same options, text, torch and number of threads the weights are the same bit for bit; with `minutes`, only if
the speed gives as many steps.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import torch

from minimax_tools.synthetic.token_stream import TokenStream
from minimax_tools.synthetic.trainee import Trainee

_log = logging.getLogger(__name__)

# Usual settings for small language models.
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
# Limit on the norm of all gradients together.
_LARGEST_GRADIENT = 1.0
_WARMUP_STEPS = 40
# Learning rate at the end, as a share of the highest.
_FINAL_SHARE = 0.05
# First and last step that are timed for --minutes. They lie within the warm-up, whose learning rates do not depend on
# the number of steps.
_TIMED_STEPS = (4, 14)
# Number of steps from one log message to the next, and over which the logged loss is averaged.
_LOGGED_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of a training."""

    num_steps: int | None  # number of steps; None if `minutes` is given
    # Training time in minutes; None if `num_steps` is given. The speed of the first steps tells how many fit.
    minutes: float | None
    batch_size: int  # number of rows of a step
    seq_len: int  # number of tokens of a row
    learning_rate: float  # highest learning rate of AdamW, after the warm-up; it falls by a cosine
    # Largest change of an expert's correction bias in a step; it falls as the learning rate does.
    bias_rate: float
    seed: int  # seed of the first weights and of the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCourse:
    """Length of a training, and its last loss."""

    num_steps: int
    num_tokens: int
    loss: float  # mean of about the last 50 steps, in nats per token
    duration_s: float


def train(trainee: Trainee, text: TokenStream, options: TrainingOptions) -> TrainingCourse:
    """Train on rows drawn from `text`; the trainee's weights change in place."""
    generator = torch.Generator().manual_seed(options.seed)
    optimiser = torch.optim.AdamW(
        _parameter_groups(trainee.module), lr=options.learning_rate, betas=_BETAS, fused=True
    )
    num_steps, step, mean_loss = options.num_steps, 0, 0.0
    trainee.module.train()
    started_s = timed_from_s = time.monotonic()
    while num_steps is None or step < num_steps:
        if step == _TIMED_STEPS[0]:
            timed_from_s = time.monotonic()
        rows = text.draw_rows(num_rows=options.batch_size, length=options.seq_len + 1, generator=generator)
        loss = _train_step(trainee, optimiser, rows, options, _rate_share(step, num_steps))
        step += 1
        if num_steps is None and step == _TIMED_STEPS[1]:
            num_steps = _count_steps(options.minutes, timed_from_s)
            _log.info("%d steps: --steps %d trains the same model", num_steps, num_steps)
        # A running mean that forgets losses older than about `_LOGGED_STEPS` steps.
        mean_loss += (loss - mean_loss) / min(step, _LOGGED_STEPS)
        if step % _LOGGED_STEPS == 0:
            duration_s = time.monotonic() - started_s
            _log.info("step %d of %s: loss %.3f, %.0f s", step, num_steps, mean_loss, duration_s)
    trainee.module.eval()
    return TrainingCourse(
        num_steps=step,
        num_tokens=step * options.batch_size * options.seq_len,
        loss=mean_loss,
        duration_s=time.monotonic() - started_s,
    )


def _train_step(
    trainee: Trainee,
    optimiser: torch.optim.Optimizer,
    rows: torch.Tensor,
    options: TrainingOptions,
    rate_share: float,
) -> float:
    """Take one step with this share of the highest rates; return the mean loss of the rows, in nats per token."""
    for group in optimiser.param_groups:
        group["lr"] = options.learning_rate * rate_share
    loss = trainee.token_losses(rows).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainee.module.parameters(), _LARGEST_GRADIENT)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    trainee.balance(rate=options.bias_rate * rate_share)
    return float(loss.detach())


def _parameter_groups(module: torch.nn.Module) -> list[dict[str, object]]:
    """Group the parameters: matrices except the embedding have weight decay, others have none."""
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in module.named_parameters():
        (decayed if parameter.dim() > 1 and "embed" not in name else others).append(parameter)
    return [{"params": decayed, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def _count_steps(minutes: float | None, timed_from_s: float) -> int:
    """Return the number of steps that fit the minutes, at the mean speed of the timed steps."""
    assert minutes is not None, "either a number of steps or minutes are given"
    first, last = _TIMED_STEPS
    step_s = (time.monotonic() - timed_from_s) / (last - first)
    return max(last, round(minutes * 60 / step_s))


def _rate_share(step: int, num_steps: int | None) -> float:
    """Return the share of the highest learning rate at a step: a linear warm-up, then a cosine.

    `num_steps` is None only while steps are timed, which is within the warm-up.
    """
    if num_steps is None or step < _WARMUP_STEPS:
        return (step + 1) / _WARMUP_STEPS
    progress = (step - _WARMUP_STEPS) / max(num_steps - _WARMUP_STEPS, 1)
    return _FINAL_SHARE + (1 - _FINAL_SHARE) * (1 + math.cos(math.pi * progress)) / 2

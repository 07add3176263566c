"""Training of a small MiniMax-M2: AdamW on next tokens; the load alone moves the router's bias.

With the same options, seed, text, torch and number of threads the weights are the same bit for bit.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import torch

from minimax_tools.synthetic.corpus import TokenStream
from minimax_tools.synthetic.trainee import Trainee

_log = logging.getLogger(__name__)

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
_LARGEST_GRADIENT = 1.0
_WARMUP_STEPS = 40
# Steps that are timed for --minutes: within the warm-up, whose rates do not depend on the number of steps.
_TIMED_STEPS = (4, 14)
_FINAL_SHARE = 0.05  # of the learning rate, at the end
_LOGGED_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of a training.

    Args:
        num_steps: Number of steps; None if `minutes` is given.
        minutes: Training time in minutes, from which the speed of the first steps gives the number of steps.
        batch_size: Number of rows of a step.
        seq_len: Number of tokens of a row.
        learning_rate: Highest learning rate of AdamW, after the warm-up; it falls by a cosine.
        bias_rate: Largest change of an expert's correction bias in a step; it falls as the learning rate does.
        seed: Seed of the first weights and of the rows.
    """

    num_steps: int | None
    minutes: float | None
    batch_size: int
    seq_len: int
    learning_rate: float
    bias_rate: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCourse:
    """Length of a training, and its final `loss`: the mean of the last steps, in nats per token."""

    num_steps: int
    num_tokens: int
    loss: float
    duration_s: float


def train(trainee: Trainee, text: TokenStream, options: TrainingOptions) -> TrainingCourse:
    """Train on rows drawn from `text`; the trainee's weights change in place."""
    generator = torch.Generator().manual_seed(options.seed)
    optimiser = torch.optim.AdamW(_groups(trainee.module), lr=options.learning_rate, betas=_BETAS, fused=True)
    num_steps, step, recent = options.num_steps, 0, 0.0
    trainee.module.train()
    begun_s = timed_s = time.monotonic()
    while num_steps is None or step < num_steps:
        if step == _TIMED_STEPS[0]:
            timed_s = time.monotonic()
        share = _share(step, num_steps)
        for group in optimiser.param_groups:
            group["lr"] = options.learning_rate * share
        rows = text.draw_rows(num_rows=options.batch_size, length=options.seq_len + 1, generator=generator)
        loss = trainee.token_losses(rows).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainee.module.parameters(), _LARGEST_GRADIENT)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        trainee.balance(rate=options.bias_rate * share)
        step += 1
        if num_steps is None and step == _TIMED_STEPS[1]:
            num_steps = _reckon_steps(options.minutes, timed_s)
            _log.info("%d steps: --steps %d trains the same model", num_steps, num_steps)
        recent += (float(loss.detach()) - recent) / min(step, _LOGGED_STEPS)
        if step % _LOGGED_STEPS == 0:
            _log.info("step %d of %s: loss %.3f, %.0f s", step, num_steps, recent, time.monotonic() - begun_s)
    trainee.module.eval()
    return TrainingCourse(
        num_steps=step,
        num_tokens=step * options.batch_size * options.seq_len,
        loss=recent,
        duration_s=time.monotonic() - begun_s,
    )


def _groups(module: torch.nn.Module) -> list[dict[str, object]]:
    """Group the parameters: matrices except the embedding have weight decay, others have none."""
    named = list(module.named_parameters())
    decayed = {name for name, parameter in named if parameter.dim() > 1 and "embed" not in name}
    return [
        {
            "params": [parameter for name, parameter in named if name in decayed],
            "weight_decay": _WEIGHT_DECAY,
        },
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]


def _reckon_steps(minutes: float | None, timed_s: float) -> int:
    assert minutes is not None, "either a number of steps or minutes are given"
    first, last = _TIMED_STEPS
    step_s = (time.monotonic() - timed_s) / (last - first)
    return max(last, round(minutes * 60 / step_s))


def _share(step: int, num_steps: int | None) -> float:
    """Return the share of the highest learning rate at a step: a linear warm-up, then a cosine."""
    if num_steps is None or step < _WARMUP_STEPS:
        return (step + 1) / _WARMUP_STEPS
    progress = (step - _WARMUP_STEPS) / max(num_steps - _WARMUP_STEPS, 1)
    return _FINAL_SHARE + (1 - _FINAL_SHARE) * (1 + math.cos(math.pi * progress)) / 2

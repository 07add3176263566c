"""Massive channels to train with: a few channels of the residual stream that are large for every token.

Large models grow them; a small model is given them before its training, which keeps them and builds upon them.
"""

from __future__ import annotations

import math

import torch

from minimax_tools.synthetic.trainee import Trainee

_ORDINARY = 0.5  # root mean square of an ordinary channel of the embedding
_MASSIVE = (32.0, -28.0, 24.0, -20.0)  # in turn; 40 to 64 times an ordinary channel
_MASSIVE_AFTER_NORM = 2.0  # where an ordinary channel is 1


def plant_massive_channels(trainee: Trainee, *, count: int, seed: int) -> None:
    """Give an untrained model `count` massive channels, drawn by `seed`, in place.

    Every row of the embedding holds the same large numbers there. The weights of all norms undo what these channels
    add to the mean square.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(trainee.module.named_parameters())
    embedding = parameters["model.embed_tokens.weight"]
    hidden_size = embedding.shape[1]
    channels = torch.randperm(hidden_size, generator=generator)[:count]
    magnitudes = torch.tensor([_MASSIVE[number % len(_MASSIVE)] for number in range(count)])
    rms = math.sqrt(_ORDINARY**2 + float(magnitudes.square().sum()) / hidden_size)
    with torch.no_grad():
        embedding.normal_(std=_ORDINARY, generator=generator)
        embedding[:, channels] = magnitudes
        for name, parameter in parameters.items():
            if name.endswith("layernorm.weight") or name == "model.norm.weight":
                parameter.fill_(rms / _ORDINARY)
                parameter[channels] = _MASSIVE_AFTER_NORM * rms / magnitudes.abs()

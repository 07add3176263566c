"""Massive channels: a few channels of the residual stream that are far larger than the others."""

from __future__ import annotations

import math

import torch

from minimax_tools.synthetic.trainee import Trainee

# Root mean square of the embedding's ordinary channels.
_ORDINARY_RMS = 0.5
# Values of the massive channels, taken in turn: 40 to 64 times an ordinary channel.
_MAGNITUDES = (32.0, -28.0, 24.0, -20.0)
# Magnitude of a massive channel after a norm; an ordinary channel has 1.
_MASSIVE_AFTER_NORM = 2.0


def plant_massive_channels(trainee: Trainee, *, count: int, seed: int) -> None:
    """Give an untrained model `count` massive channels, drawn by `seed`, in place.

    In each of these channels all rows of the embedding hold the same large number. The norms' weights are scaled so
    that ordinary channels have magnitude 1 after a norm, as without massive channels.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(trainee.module.named_parameters())
    embedding = parameters["model.embed_tokens.weight"]
    hidden_size = embedding.shape[1]
    channels = torch.randperm(hidden_size, generator=generator)[:count]
    magnitudes = torch.tensor([_MAGNITUDES[number % len(_MAGNITUDES)] for number in range(count)])
    rms = math.sqrt(_ORDINARY_RMS**2 + float(magnitudes.square().sum()) / hidden_size)
    with torch.no_grad():
        embedding.normal_(std=_ORDINARY_RMS, generator=generator)
        embedding[:, channels] = magnitudes
        for name, parameter in parameters.items():
            if name.endswith("layernorm.weight") or name == "model.norm.weight":
                parameter.fill_(rms / _ORDINARY_RMS)
                parameter[channels] = _MASSIVE_AFTER_NORM * rms / magnitudes.abs()

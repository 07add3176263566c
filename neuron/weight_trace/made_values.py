"""Made values: what the elements of a layer are given in each pass of a trace, from their numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from neuron.weight_trace.sources import Source

# Sixteen digits are exact even in FP8, and survive a scale in BF16.
BASE = 16
NUM_SIGNS = 16

# The values of a source, from the numbers of its elements; one value stands for all.
MadeValues = Callable[[Source, torch.Tensor], torch.Tensor]


def probe_values(source: Source, numbers: torch.Tensor) -> torch.Tensor:
    """Values from 1 to 2 without pattern, with as many bits as the tensor is given with."""
    return exact_probe(numbers) if source.is_float32 else short_probe(numbers)


def exact_probe(numbers: torch.Tensor) -> torch.Tensor:
    """Values from 1 to 2 without pattern, float32."""
    mixed = (numbers * 2654435761 + 40503) % (1 << 32)
    mixed = ((mixed >> 15) ^ mixed) * 2246822519 % (1 << 32)
    return ((1 << 23) + (mixed >> 9)).float() / (1 << 23)


def short_probe(numbers: torch.Tensor) -> torch.Tensor:
    """The same with the bits of BF16, float32."""
    return exact_probe(numbers).bfloat16().float()


def level(value: int) -> MadeValues:
    """One value everywhere."""
    return lambda source, numbers: torch.tensor([float(value)])


def level_but(kind: str) -> MadeValues:
    """One everywhere, but for one kind of tensors."""
    return lambda source, numbers: (
        probe_values(source, numbers) if source.kind == kind else torch.tensor([1.0])
    )


def digit(power: int) -> MadeValues:
    """One more than a digit of the number."""
    return lambda source, numbers: (numbers // BASE**power % BASE + 1).float()


def signs(seed: int) -> MadeValues:
    """1 or -1 without pattern."""

    def values(source: Source, numbers: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(source.start * NUM_SIGNS + seed)
        return torch.randint(2, numbers.shape, generator=generator).mul(2).sub(1).float()

    return values

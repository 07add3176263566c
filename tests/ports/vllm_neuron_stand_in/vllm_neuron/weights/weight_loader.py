"""Stand-in for vllm_neuron/utils/weight_loader.py: from slices of a checkpoint to a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class SafetensorsWeightLoader:
    """A loader of one parameter: `transform(slices, rank)`, or the only slice as it is."""

    transform: Any = None

    def load(self, slices, rank):
        """Return the parameter's values."""
        values = self.transform(slices, rank) if self.transform else slices[0][:]
        return values.contiguous()


def set_weight_loader(param, loader):
    """Attach a loader to a parameter."""
    param.weight_loader = loader


def get_weight_loader(param):
    """Return a parameter's loader."""
    return getattr(param, "weight_loader", SafetensorsWeightLoader())

"""OriginReader: finds out for every element of what a port holds which of the checkpoint landed there.

The port's own conversion and loading are run several times on made tensors. Levels of 1 and 2 everywhere tell by what
an element is multiplied and what is added to it; then each element's number is spelled, one digit a pass; a last pass
of numbers without pattern proves what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from neuron.origins.made_tensors import Make
from neuron.origins.made_values import (
    BASE,
    NUM_SIGNS,
    MadeValues,
    digit,
    level,
    level_but,
    probe_values,
    signs,
)
from neuron.origins.origin import Origin
from neuron.origins.reading import Reading
from neuron.origins.sources import Sources

# Loads made tensors into the port, and gives every tensor that it then holds, by name.
LoadMade = Callable[[Make], Mapping[str, torch.Tensor]]


class OriginReader:
    """Reads the origins of a port's places.

    Args:
        sources: The layer's tensors.
        load: Loads made tensors.
    """

    def __init__(self, sources: Sources, load: LoadMade) -> None:
        self._sources = sources
        self._load = load
        self._dtypes: dict[str, torch.dtype] = {}

    def read(self) -> list[Origin]:
        """The origin of every place, in the module's order.

        Raises:
            TargetError: The port's conversion raised, or does not fit its module.
        """
        first, second = self._pass(level(1)), self._pass(level(2))
        readings = {
            name: Reading(values, second[name], dtype=self._dtypes[name])
            for name, values in first.items()
            if name in second and second[name].shape == values.shape
        }
        for power in reversed(range(self._num_digits())):
            for name, values in self._taking(readings, digit(power)):
                readings[name].take_digit(values)
        for name, values in self._taking(readings, probe_values):
            readings[name].prove(values, self._sources)
        if any(bool(reading.is_computed.any()) for reading in readings.values()):
            self._weigh_computed(readings)
        return [reading.origin(name) for name, reading in readings.items()]

    def _num_digits(self) -> int:
        count = 1
        while BASE**count < self._sources.size:
            count += 1
        return count

    def _weigh_computed(self, readings: Mapping[str, Reading]) -> None:
        """Feed signs without pattern: the mean square of what comes is the sum of the squares of the weights."""
        for seed in range(NUM_SIGNS):
            for name, values in self._taking(readings, signs(seed)):
                readings[name].take_signs(values)
        for kind in dict.fromkeys(source.kind for source in self._sources.all):
            for name, values in self._taking(readings, level_but(kind)):
                readings[name].take_kind(kind, values)

    def _taking(
        self, readings: Mapping[str, Reading], values_of: MadeValues
    ) -> list[tuple[str, torch.Tensor]]:
        return [(name, values) for name, values in self._pass(values_of).items() if name in readings]

    def _pass(self, values_of: MadeValues) -> dict[str, torch.Tensor]:
        """What every place holds after a pass in which each element is made from its number."""

        def make(name: str) -> torch.Tensor:
            source = self._sources[name]
            numbers = torch.arange(source.start, source.start + source.size)
            return values_of(source, numbers).expand(source.size).reshape(source.shape)

        places = self._load(make)
        self._dtypes = {name: tensor.dtype for name, tensor in places.items()}
        return {name: tensor.to(torch.float64, copy=True) for name, tensor in places.items()}

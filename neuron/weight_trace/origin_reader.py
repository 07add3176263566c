"""OriginReader: finds out for every element of what a port holds which of the checkpoint landed there.

The port's own conversion and loading are run several times on made tensors. Levels of 1 and 2 everywhere tell by what
an element is multiplied and what is added to it; then each element's number is spelled, one digit a pass; a last pass
of numbers without pattern proves what was read. Tensors that are not followed stay at 1: of every place only the part
is kept that answers to those that are, and one more pass tells what is constant from what was left aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from neuron.weight_trace.made_tensors import (
    BASE,
    NUM_SIGNS,
    MadeValues,
    Make,
    digit,
    level,
    level_but,
    probe_values,
    signs,
)
from neuron.weight_trace.origin import Origin
from neuron.weight_trace.place_part import Baseline, PlacePart
from neuron.weight_trace.reading import PlaceReading
from neuron.weight_trace.sources import Sources

# Loads made tensors into the port, and gives every tensor that it then holds, by name.
LoadMade = Callable[[Make], Mapping[str, torch.Tensor]]

_ASIDE = 3.0


class OriginReader:
    """Reads the origins of a port's places.

    Args:
        sources: The tensors that are followed: all of a layer, or some.
        shapes: Those of all tensors of the layer, by name.
        load: Loads made tensors.
    """

    def __init__(self, sources: Sources, shapes: Mapping[str, tuple[int, ...]], load: LoadMade) -> None:
        self._sources = sources
        self._shapes = shapes
        self._load = load
        self._parts: dict[str, PlacePart] = {}
        self._readings: dict[str, PlaceReading] = {}
        self._place_shapes: dict[str, tuple[int, ...]] = {}

    def read(self) -> list[Origin]:
        """The origin of every place that what is followed lands in, and of those that hold nothing of the checkpoint.

        They come in the module's order.

        Raises:
            TargetError: The port's conversion raised, or does not fit its module.
        """
        self._begin()
        for power in reversed(range(self._num_digits())):
            for name, place in self._pass(digit(power)).items():
                self._readings[name].take_digit(place)
        for name, place in self._pass(probe_values).items():
            self._readings[name].prove(place, self._sources)
        if any(reading.has_computed for reading in self._readings.values()):
            self._weigh_computed()
        return [
            self._readings.pop(name).origin(name, self._place_shapes[name]) for name in list(self._readings)
        ]

    def _begin(self) -> None:
        """The passes of ones and twos, and of what is not followed."""
        first = {name: Baseline.of(place) for name, place in self._load_all(level(1)).items()}
        unanswering: dict[str, Baseline] = {}
        for name, place in self._load_all(level(2)).items():
            baseline = first.pop(name, None)
            if baseline is None or baseline.shape != place.shape:
                continue
            self._place_shapes[name] = tuple(place.shape)
            part = self._choose_part(baseline, place)
            if part is None:
                unanswering[name] = baseline
                part = PlacePart.first_element(place)
            self._parts[name] = part
            self._readings[name] = PlaceReading(part.of_baseline(baseline), part.of(place))
        if not self._follows_all:
            for name, place in self._load_all(level(1), aside=_ASIDE).items():
                if name not in self._readings:
                    continue
                if name in unanswering and unanswering[name].has_changed(place):
                    # It holds nothing but what is left aside.
                    del self._readings[name]
                else:
                    self._readings[name].take_aside(self._parts[name].of(place))

    @property
    def _follows_all(self) -> bool:
        return len(self._sources.all) == len(self._shapes)

    def _choose_part(self, baseline: Baseline, place: torch.Tensor) -> PlacePart | None:
        if self._follows_all or place.dim() == 0:
            return PlacePart.whole(place)
        part = PlacePart.changed(baseline, place)
        if part is None and baseline.values.dim():
            # Its elements differ, and are the same whatever it is fed: all of it is shown.
            return PlacePart.whole(place)
        return part

    def _num_digits(self) -> int:
        count = 1
        while BASE**count < self._sources.size:
            count += 1
        return count

    def _weigh_computed(self) -> None:
        """Feed signs without pattern: the mean square of what comes is the sum of the squares of the weights."""
        for seed in range(NUM_SIGNS):
            for name, place in self._pass(signs(seed)).items():
                self._readings[name].take_signs(place)
        for kind in dict.fromkeys(source.kind for source in self._sources.all):
            for name, place in self._pass(level_but(kind)).items():
                self._readings[name].take_kind(kind, place)

    def _pass(self, values_of: MadeValues) -> dict[str, torch.Tensor]:
        """The followed part of every place after a pass in which each element is made from its number."""
        places = self._load_all(values_of)
        return {name: self._parts[name].of(places[name]) for name in self._readings if name in places}

    def _load_all(self, values_of: MadeValues, *, aside: float = 1.0) -> Mapping[str, torch.Tensor]:
        """What every place holds after a pass; tensors that are not followed are `aside` everywhere."""

        def make(name: str) -> torch.Tensor:
            source = self._sources.get(name)
            if source is None:
                return torch.tensor(aside).expand(self._shapes[name])
            numbers = torch.arange(source.start, source.start + source.size)
            return values_of(source, numbers).expand(source.size).reshape(source.shape)

        return self._load(make)

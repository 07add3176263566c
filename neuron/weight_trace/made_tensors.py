"""MadeTensors: a layer's tensors whose values are made when they are asked for; what a conversion is traced with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FLOAT32_NAMES, expected_layer_shapes
from neuron.weight_trace.sources import SourceTensors

# Makes the values of the tensor of a name, of its shape, in any dtype.
Make = Callable[[str], torch.Tensor]


class MadeTensors(LayerTensors):
    """Behaves as the layer's own tensors do, and reads nothing.

    Args:
        spec: The model; another than the checkpoint's may be smaller.
        layer: Its number.
        dtype: Of all tensors but the router gate and the correction bias, which are float32.
        make: Makes the values.
        reader: The checkpoint, whose tensors these stand for.
        present: What was set or is left, where this is a copy.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layer: int,
        dtype: torch.dtype,
        make: Make,
        reader: CheckpointReader,
        present: Mapping[str, torch.Tensor | None] | None = None,
    ) -> None:
        names = expected_layer_shapes(spec)
        super().__init__(
            reader,
            layer=layer,
            dtype=dtype,
            stored={name: torch.float32 if name in FLOAT32_NAMES else dtype for name in names},
            present=dict.fromkeys(names) if present is None else present,
        )
        self._spec = spec
        self._make = make
        self._shapes = names

    def given_dtype(self, name: str) -> torch.dtype:
        """The dtype in which an access gives the tensor."""
        return self._stored[name] if self.is_stored(name) else super().given_dtype(name)

    def given_shape(self, name: str) -> tuple[int, ...]:
        """The shape of what an access gives."""
        return self._shapes[name] if self.is_stored(name) else super().given_shape(name)

    def copy(self) -> MadeTensors:
        """A second mapping: setting or removing in one leaves the other alone."""
        return MadeTensors(
            self._spec,
            layer=self.layer,
            dtype=self.dtype,
            make=self._make,
            reader=self._reader,
            present=self._present,
        )

    def _value(self, name: str) -> torch.Tensor:
        value = super()._value(name)
        if value is not None:
            return value
        return self._make(name).to(self._stored[name])


# Sixteen digits are exact even in FP8, and survive a scale in BF16.
BASE = 16
NUM_SIGNS = 16

# The values of a source, from the numbers of its elements; one value stands for all.
MadeValues = Callable[[SourceTensors, torch.Tensor], torch.Tensor]


def probe_values(source: SourceTensors, numbers: torch.Tensor) -> torch.Tensor:
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

    def values(source: SourceTensors, numbers: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(source.start * NUM_SIGNS + seed)
        return torch.randint(2, numbers.shape, generator=generator).mul(2).sub(1).float()

    return values

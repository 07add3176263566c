"""MadeTensors: a layer's tensors whose values are made when they are asked for; what a conversion is traced with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FLOAT32_NAMES, expected_layer_shapes

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

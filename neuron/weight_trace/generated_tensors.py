"""Generated tensors: stand-ins for a layer's tensors, each made on access, that are traced through a port's weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FLOAT32_NAMES, expected_layer_shapes

Tensors = Mapping[str, torch.Tensor]
# Makes the tensor of a name.
MakeTensor = Callable[[str], torch.Tensor]


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each made anew at every access: so a layer of true size never lies in memory."""

    def __init__(self, names: Collection[str], make: MakeTensor) -> None:
        self._names = names
        self._make = make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class GeneratedTensors(LayerTensors):
    """A stand-in for the checkpoint's `LayerTensors` that generates values and reads nothing.

    `make` makes the values of a tensor in its shape; `dtype` is that of all but the router gate and the correction
    bias, which are float32. The model of `spec` may be smaller than the checkpoint's.
    """

    def __init__(
        self, spec: ModelSpec, *, layer: int, dtype: torch.dtype, make: MakeTensor, reader: CheckpointReader
    ) -> None:
        self._shapes = expected_layer_shapes(spec)
        self._make = make
        super().__init__(
            reader,
            layer=layer,
            dtype=dtype,
            stored={name: torch.float32 if name in FLOAT32_NAMES else dtype for name in self._shapes},
            present=dict.fromkeys(self._shapes),  # None for each name: no value is set in place of its tensor
        )

    def given_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which an access gives the tensor, without making it."""
        # The parent would make the tensor to answer. Nobody has set a "stored" one to another value.
        return self._stored[name] if self.is_stored(name) else super().given_dtype(name)

    def given_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in which an access gives the tensor."""
        return self._shapes[name] if self.is_stored(name) else super().given_shape(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        value = super().__getitem__(name)
        # The port may change in place what it gets.
        return value.contiguous() if self.is_stored(name) else value

    def _value_in_memory(self, name: str) -> torch.Tensor | None:
        value = super()._value_in_memory(name)
        return _cast(self._make(name), self._stored[name]) if value is None else value


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in a dtype; if a single number is expanded to it, so is the result."""
    if any(tensor.stride()):
        return tensor.to(dtype)
    return tensor[(0,) * tensor.dim()].to(dtype).expand(tensor.shape)

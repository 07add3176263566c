"""LayerWeights: one decoder layer's weights as the float32 layer computes with them, and their FP8 codes.

Tensors that were read are kept: FP8 as codes and scales, others in the golden's dtype. An expert's matrix is float32
only while it is in use; all other weights stay in float32 too. R rows and C columns of a matrix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minimax_tools.checkpoint.fp8 import CODE_NUMBERS, decode_codes
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.weight_names import INPUT_NORM, layer_prefix, scale_name

# From a shape to float32 memory of that shape, whatever it holds.
Allocate = Callable[[Sequence[int]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoding:
    """A way to read FP8 matrices: a number for each code, times the scale of its block."""

    numbers: torch.Tensor = CODE_NUMBERS  # number of each code by its byte, float32 [256]
    # From the stored block scales to those that are used, float32 of one shape.
    scales: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales


_AS_MEANT = Decoding()


class LayerWeights:
    """The weights of a layer by the hub's relative names; safe to use from several threads.

    Values are rounded to the dtype of `tensors`, the golden's, before they become float32. Without `keeps`,
    tensors that were read are not kept, but for those that `kept_value` made float32.
    """

    def __init__(self, tensors: LayerTensors, *, keeps: bool = True) -> None:
        self._tensors = tensors
        self._prefix = layer_prefix(tensors.layer)
        self._keeps = keeps
        self._kept: dict[str, torch.Tensor] = {}
        self._float32: dict[str, torch.Tensor] = {}
        self._others: dict[int, LayerWeights] = {}
        self._lock = threading.Lock()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the golden computes in."""
        return self._tensors.dtype

    @property
    def layer(self) -> int:
        """Number of the layer."""
        return self._tensors.layer

    def has_layer(self, layer: int) -> bool:
        """Decide whether the checkpoint that is open here holds another layer's weights."""
        return layer_prefix(layer) + INPUT_NORM in self._tensors.reader.index.entries

    def of_layer(self, layer: int) -> LayerWeights:
        """Return the weights of another layer of the same checkpoint; its experts' matrices are read at every use.

        Raises:
            CheckpointError: The checkpoint lacks them.
        """
        with self._lock:
            if layer not in self._others:
                self._others[layer] = LayerWeights(self._tensors.of_layer(layer), keeps=False)
            return self._others[layer]

    def is_fp8(self, name: str) -> bool:
        """Decide whether the checkpoint stores the tensor as FP8 codes."""
        return self._tensors.stored_dtype(name) == torch.float8_e4m3fn

    def value(
        self, name: str, decoding: Decoding = _AS_MEANT, *, allocate: Allocate = torch.empty
    ) -> torch.Tensor:
        """Read a tensor's values, float32; they are converted at every call, into memory of `allocate`.

        What is kept in float32 is returned itself. A matrix that is not FP8 has no other decoding.
        """
        if not self.is_fp8(name):
            stored = self._keep(name, lambda: self._tensors[name])
            return stored if stored.dtype == torch.float32 else allocate(stored.shape).copy_(stored)
        codes, scales = self.codes(name)
        return decode_codes(
            codes,
            decoding.scales(scales),
            numbers=decoding.numbers,
            dtype=self._tensors.dtype,
            out=allocate(codes.shape),
        )

    def kept_value(self, name: str) -> torch.Tensor:
        """Read a tensor's values, float32; they are converted once and kept, which is too much for experts."""
        with self._lock:
            if name not in self._float32:
                self._float32[name] = self.value(name)
            return self._float32[name]

    def codes(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the FP8 codes [R,C] and block scales of a matrix."""
        reader, full_name = self._tensors.reader, self._prefix + name
        scales = scale_name(name)
        return (
            self._keep(name, lambda: reader.read(full_name)),
            self._keep(scales, lambda: reader.read(self._prefix + scales)),
        )

    def _keep(self, name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        # Without a lock: two threads may read a tensor twice, and then keep equal values.
        if not self._keeps:
            return read()
        if name not in self._kept:
            self._kept[name] = read()
        return self._kept[name]

"""LayerWeights: one decoder layer's weights as the float32 layer computes with them, and their FP8 codes.

Tensors that were read are kept: FP8 as codes and scales, others in the golden's dtype. An expert's matrix is float32
only while it is in use; all other weights stay in float32 too. R rows and C columns of a matrix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from minimax_tools.checkpoint.fp8 import dequantise
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.quantisation import BLOCK_SIZE, scale_shape
from minimax_tools.model.weight_names import INPUT_NORM, layer_prefix, scale_name

# From the codes [R,C] and their scales, one per block of 128 x 128, to the values [R,C] of any float dtype.
Decode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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

    def value(self, name: str) -> torch.Tensor:
        """Read a tensor's values, float32; they are converted at every call."""
        if not self.is_fp8(name):
            return self._keep(name, lambda: self._tensors[name]).float()
        return dequantise(*self.codes(name), dtype=self._tensors.dtype).float()

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

    def decoded(self, name: str, decode: Decode) -> torch.Tensor:
        """Read an FP8 matrix by another decoding, rounded to the golden's dtype: float32 [R,C]."""
        return decode(*self.codes(name)).to(self._tensors.dtype).float()

    def _keep(self, name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        # Without a lock: two threads may read a tensor twice, and then keep equal values.
        if not self._keeps:
            return read()
        if name not in self._kept:
            self._kept[name] = read()
        return self._kept[name]


def read_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers that FP8 codes [R,C] stand for, float32."""
    return dequantise(codes, torch.ones(scale_shape(tuple(codes.shape))), dtype=torch.float32)


def spread_scales(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Spread block scales to one value per element, float32 [R,C]."""
    rows = scales.repeat_interleave(BLOCK_SIZE, dim=0)[: shape[0]]
    return rows.repeat_interleave(BLOCK_SIZE, dim=1)[:, : shape[1]]

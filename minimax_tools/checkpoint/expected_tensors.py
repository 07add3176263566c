"""The tensors of a checkpoint, known from config.json before anything is downloaded or written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minimax_tools.model.quantisation import scale_shape
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    EMBEDDING,
    FINAL_NORM,
    GATE,
    LM_HEAD,
    expected_layer_shapes,
    float32_names,
    layer_prefix,
    scale_name,
)
from minimax_tools.stored_dtype import BFLOAT16, FLOAT8_E4M3FN, FLOAT16, FLOAT32, StoredDtype

if TYPE_CHECKING:
    import torch

# Dtypes by their names in config.json, which for an FP8 checkpoint names the dtype of the tensors that are not FP8.
_STORED_DTYPES = {dtype.name: dtype for dtype in (BFLOAT16, FLOAT16, FLOAT32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSize:
    """Name, shape and dtype of a tensor, without data."""

    name: str
    shape: tuple[int, ...]
    dtype: StoredDtype

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSize:
        """Return the size of a tensor under a name."""
        return cls(name=name, shape=tuple(tensor.shape), dtype=StoredDtype.of(tensor.dtype))

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"


def expected_tensors(spec: ModelSpec) -> Iterator[TensorSize]:
    """Yield the tensors of the spec's checkpoint, in the dtypes that config.json names, or BF16 if it names none."""
    dtype_name = str(spec.raw.get("dtype") or spec.raw.get("torch_dtype"))
    plain_dtype = _STORED_DTYPES.get(dtype_name, BFLOAT16)
    matrix_dtype = FLOAT8_E4M3FN if spec.is_fp8 else plain_dtype
    return model_tensors(spec, matrix_dtype=matrix_dtype, plain_dtype=plain_dtype)


def model_tensors(
    spec: ModelSpec, *, matrix_dtype: StoredDtype, plain_dtype: StoredDtype
) -> Iterator[TensorSize]:
    """Yield the tensors of a model: layers' matrices in `matrix_dtype`, with block scales if that is FP8.

    Tensors of a float32 router are float32, all others `plain_dtype`: no FP8 checkpoint quantises its router. Names are
    those that the family stores.
    """
    vocabulary, stored = (spec.vocab_size, spec.hidden_size), spec.family.stored_names.stored
    yield TensorSize(name=stored(EMBEDDING), shape=vocabulary, dtype=plain_dtype)
    yield TensorSize(name=stored(FINAL_NORM), shape=(spec.hidden_size,), dtype=plain_dtype)
    if not spec.tie_word_embeddings:
        yield TensorSize(name=stored(LM_HEAD), shape=vocabulary, dtype=plain_dtype)
    in_float32 = float32_names(spec.graph)
    for layer in range(spec.num_hidden_layers):
        for relative, shape in expected_layer_shapes(spec, layer).items():
            name = stored(layer_prefix(layer) + relative)
            if relative in in_float32:
                yield TensorSize(name=name, shape=shape, dtype=FLOAT32)
            elif len(shape) == 2 and relative != GATE:
                yield TensorSize(name=name, shape=shape, dtype=matrix_dtype)
                if matrix_dtype == FLOAT8_E4M3FN:
                    yield TensorSize(name=scale_name(name), shape=scale_shape(shape), dtype=FLOAT32)
            else:
                yield TensorSize(name=name, shape=shape, dtype=plain_dtype)

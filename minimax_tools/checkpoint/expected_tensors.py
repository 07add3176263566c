"""The tensors of a MiniMax-M2's checkpoint, known from config.json before anything is downloaded or written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from minimax_tools.checkpoint.fp8 import scale_shape
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    EMBEDDING,
    FINAL_NORM,
    FLOAT32_NAMES,
    LM_HEAD,
    expected_layer_shapes,
    layer_prefix,
    scale_name,
)

# Dtypes by their names in config.json, which for an FP8 checkpoint names the dtype of the tensors that are not FP8.
_STORED_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSize:
    """Name, shape and dtype of a tensor, without data."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"


def expected_tensors(spec: ModelSpec) -> Iterator[TensorSize]:
    """Yield the tensors of the spec's checkpoint, in the dtypes that config.json names, or BF16 if it names none."""
    dtype_name = str(spec.raw.get("dtype") or spec.raw.get("torch_dtype"))
    plain_dtype = _STORED_DTYPES.get(dtype_name, torch.bfloat16)
    matrix_dtype = torch.float8_e4m3fn if spec.is_fp8 else plain_dtype
    return model_tensors(spec, matrix_dtype=matrix_dtype, plain_dtype=plain_dtype)


def model_tensors(
    spec: ModelSpec, *, matrix_dtype: torch.dtype, plain_dtype: torch.dtype
) -> Iterator[TensorSize]:
    """Yield the tensors of a model: layers' matrices in `matrix_dtype`, with block scales if that is FP8.

    Router gate and correction bias are float32, all other tensors `plain_dtype`.
    """
    vocabulary = (spec.vocab_size, spec.hidden_size)
    yield TensorSize(name=EMBEDDING, shape=vocabulary, dtype=plain_dtype)
    yield TensorSize(name=FINAL_NORM, shape=(spec.hidden_size,), dtype=plain_dtype)
    if not spec.tie_word_embeddings:
        yield TensorSize(name=LM_HEAD, shape=vocabulary, dtype=plain_dtype)
    for layer in range(spec.num_hidden_layers):
        for relative, shape in expected_layer_shapes(spec).items():
            name = layer_prefix(layer) + relative
            if relative in FLOAT32_NAMES:
                yield TensorSize(name=name, shape=shape, dtype=torch.float32)
            elif len(shape) == 2:
                yield TensorSize(name=name, shape=shape, dtype=matrix_dtype)
                if matrix_dtype == torch.float8_e4m3fn:
                    yield TensorSize(name=scale_name(name), shape=scale_shape(shape), dtype=torch.float32)
            else:
                yield TensorSize(name=name, shape=shape, dtype=plain_dtype)

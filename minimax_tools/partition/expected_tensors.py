"""Sizes of a MiniMax-M2's tensors, known from config.json alone before anything is downloaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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

# Dtypes by their names in config.json.
_STORED_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSize:
    """Name, dtype and shape of a stored tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes on the disk."""
        return math.prod(self.shape) * self.dtype.itemsize


def expected_tensors(spec: ModelSpec) -> Iterable[TensorSize]:
    """Yield the tensors of a MiniMax-M2; FP8 matrices come with their block scales."""
    is_fp8 = (spec.raw.get("quantization_config") or {}).get("quant_method") == "fp8"
    unquantized = _STORED_DTYPES.get(
        str(spec.raw.get("dtype") or spec.raw.get("torch_dtype")), torch.bfloat16
    )
    vocabulary = (spec.vocab_size, spec.hidden_size)
    yield TensorSize(name=EMBEDDING, dtype=unquantized, shape=vocabulary)
    yield TensorSize(name=FINAL_NORM, dtype=unquantized, shape=(spec.hidden_size,))
    if not spec.tie_word_embeddings:
        yield TensorSize(name=LM_HEAD, dtype=unquantized, shape=vocabulary)
    for layer in range(spec.num_hidden_layers):
        for relative, shape in expected_layer_shapes(spec).items():
            name = layer_prefix(layer) + relative
            if relative in FLOAT32_NAMES:
                yield TensorSize(name=name, dtype=torch.float32, shape=shape)
            elif is_fp8 and len(shape) == 2:
                yield TensorSize(name=name, dtype=torch.float8_e4m3fn, shape=shape)
                yield TensorSize(name=scale_name(name), dtype=torch.float32, shape=scale_shape(shape))
            else:
                yield TensorSize(name=name, dtype=unquantized, shape=shape)

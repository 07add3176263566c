"""What a model's weights take in memory, told from its shapes."""

from __future__ import annotations

import math

import torch

from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FLOAT32_NAMES, expected_layer_shapes


def layer_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """The weights of one decoder layer in `dtype`, router gate and correction bias in float32."""
    return sum(
        math.prod(shape) * (torch.float32 if name in FLOAT32_NAMES else dtype).itemsize
        for name, shape in expected_layer_shapes(spec).items()
    )


def vocabulary_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """The embedding's weights in `dtype`; the lm_head takes as much."""
    return spec.vocab_size * spec.hidden_size * dtype.itemsize

"""Stand-in for vllm_neuron/model/kv_cache.py: what a model asks of the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class LayerSpec:
    """The cache of one layer."""

    name: str
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window_size: int | None = None
    chunk_size: int | None = None


@dataclass
class KVSpec:
    """The cache of all layers."""

    layers: list[LayerSpec]

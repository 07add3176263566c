"""Sizes told from shapes are those of the stored tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING, layer_bytes, vocabulary_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_and_vocabulary_take_what_reading_them_gives(toy: Path, dtype: torch.dtype) -> None:
    spec = ModelSpec.from_folder(toy)
    with CheckpointReader(toy) as reader:
        tensors = LayerTensors.open(reader, spec, 1, dtype)
        assert layer_bytes(spec, dtype) == sum(tensors[name].nbytes for name in tensors)
        assert vocabulary_bytes(spec, dtype) == reader.read_weight(EMBEDDING, dtype).nbytes

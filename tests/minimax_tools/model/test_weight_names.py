"""Names and shapes of a layer's tensors; sizes told from shapes are those of the stored tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    EMBEDDING,
    GATE,
    expected_layer_shapes,
    expert_weight,
    layer_bytes,
    layer_of,
    layer_prefix,
    scale_name,
    vocabulary_bytes,
)
from minimax_tools.synthetic.toy_model import SyntheticModel

MINIMAX_M2 = SyntheticModel.m2().spec()


def test_a_layer_of_minimax_m2_has_the_published_parameters() -> None:
    shapes = expected_layer_shapes(MINIMAX_M2, 0)
    assert sum(math.prod(shape) for shape in shapes.values()) == 3_668_718_848
    assert shapes["self_attn.q_proj.weight"] == (6144, 3072)
    assert shapes["self_attn.k_norm.weight"] == (1024,)
    assert shapes["block_sparse_moe.experts.255.w2.weight"] == (3072, 1536)
    assert (shapes[GATE], shapes[CORRECTION_BIAS]) == ((256, 3072), (256,))
    # All matrices but the router's gate are FP8: as many tensors as the hub counts.
    scales = [name for name, shape in shapes.items() if len(shape) == 2 and name != GATE]
    assert len(shapes) + len(scales) == 1550


def test_experts_come_in_integer_order() -> None:
    names = expected_layer_shapes(replace(MINIMAX_M2, num_local_experts=12), 0)
    first_matrices = [name for name in names if name.endswith(".w1.weight")]
    assert first_matrices == [expert_weight(expert, "w1") for expert in range(12)]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        *((layer_prefix(layer) + GATE, layer) for layer in (0, 7, 61)),
        *((name, None) for name in ("model.norm.weight", "lm_head.weight", "model.layers.weight")),
        ("x.model.layers.1.a", None),
    ],
)
def test_a_full_name_tells_its_layer(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_scales_are_named_after_their_weight() -> None:
    assert scale_name("a.weight") == "a.weight_scale_inv"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_and_vocabulary_take_what_reading_them_gives(toy: Path, dtype: torch.dtype) -> None:
    spec = ModelSpec.from_folder(toy)
    with CheckpointReader(toy) as reader:
        tensors = LayerTensors.open(reader, spec, 1, dtype)
        assert layer_bytes(spec, dtype) == sum(tensors[name].nbytes for name in tensors)
        assert vocabulary_bytes(spec, dtype) == reader.read_weight(EMBEDDING, dtype).nbytes

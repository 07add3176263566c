"""A small llama, whose tensors nothing but headers tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

_CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 6,
    "vocab_size": 24,
    "tie_word_embeddings": True,
}
_SHAPES = {
    "self_attn.q_proj.weight": (16, 16),
    "self_attn.k_proj.weight": (8, 16),
    "self_attn.v_proj.weight": (8, 16),
    "self_attn.o_proj.weight": (16, 16),
    "mlp.gate_proj.weight": (32, 16),
    "mlp.up_proj.weight": (32, 16),
    "mlp.down_proj.weight": (16, 32),
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
}


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied BF16 llama of 6 layers, a shard for each, and one for the embedding and the final norm."""
    folder = tmp_path_factory.mktemp("llama") / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    shards = [{"model.embed_tokens.weight": (24, 16), "model.norm.weight": (16,)}]
    shards += [
        {f"model.layers.{layer}.{name}": shape for name, shape in _SHAPES.items()} for layer in range(6)
    ]
    weight_map = {}
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05}-of-00007.safetensors"
        save_file(
            {name: torch.full(shape, number, dtype=torch.bfloat16) for name, shape in shapes.items()},
            folder / file,
        )
        weight_map |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder

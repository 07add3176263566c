"""A small checkpoint of MiniMax-M2, tensor by tensor, and a llama of which only headers are read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minimax_tools.hub.access import HubAccess
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    EMBEDDING,
    FINAL_NORM,
    GATE,
    LM_HEAD,
    expected_layer_shapes,
    layer_prefix,
    scale_name,
)

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
Tensors = dict[str, torch.Tensor]
Writer = Callable[..., Path]

# No width is a multiple of 128: every weight has ragged last blocks.
CONFIG = {
    "model_type": "minimax_m2",
    "hidden_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "rotary_dim": 24,
    "rope_theta": 5_000_000,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 72,
    "vocab_size": 96,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    return ModelSpec.from_config(CONFIG)


@pytest.fixture
def fp8_tensors(spec: ModelSpec) -> Tensors:
    tensors = {
        EMBEDDING: _values(EMBEDDING, (spec.vocab_size, spec.hidden_size)).to(torch.bfloat16),
        FINAL_NORM: _values(FINAL_NORM, (spec.hidden_size,)).to(torch.bfloat16),
        LM_HEAD: _values(LM_HEAD, (spec.vocab_size, spec.hidden_size)).to(torch.bfloat16),
    }
    for layer in range(spec.num_hidden_layers):
        for name, shape in expected_layer_shapes(spec, layer).items():
            _add(tensors, layer_prefix(layer) + name, shape)
    return tensors


@pytest.fixture
def bf16_tensors(fp8_tensors: Tensors) -> Tensors:
    """The BF16 copy of the same model: FP8 multiplied by its scales, gate and bias still float32."""
    copy = {}
    for name, tensor in fp8_tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            copy[name] = _product(tensor, fp8_tensors[scale_name(name)]).to(torch.bfloat16)
        elif not name.endswith("_scale_inv"):
            copy[name] = tensor
    return copy


@pytest.fixture
def float32_products(fp8_tensors: Tensors) -> Tensors:
    """The value of every FP8 weight: the float32 product before any rounding."""
    return {
        name: _product(tensor, fp8_tensors[scale_name(name)])
        for name, tensor in fp8_tensors.items()
        if tensor.dtype == torch.float8_e4m3fn
    }


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Writes tensors to a folder, neighbours to different shards, as the hub spreads layers and scales."""

    def write_folder(tensors: Mapping[str, torch.Tensor], name: str = "model", *, index: bool = True) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        names = sorted(tensors)
        files = {tensor: f"model-{place % 2:05}-of-00002.safetensors" for place, tensor in enumerate(names)}
        for file in sorted(set(files.values())):
            shard = {tensor: tensors[tensor].contiguous() for tensor in names if files[tensor] == file}
            save_file(shard, folder / file)
        if index:
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"metadata": None, "weight_map": files})
            )
        return folder

    return write_folder


def _add(tensors: Tensors, name: str, shape: tuple[int, ...]) -> None:
    values = _values(name, shape)
    if name.endswith((GATE, CORRECTION_BIAS)):
        # More bits than BF16 holds, so that a lost float32 shows.
        tensors[name] = values + 8.5
    elif len(shape) == 1:
        tensors[name] = values.to(torch.bfloat16)
    else:
        tensors[name] = values.mul(100).to(torch.float8_e4m3fn)
        grid = tuple(-(-size // 128) for size in shape)
        tensors[scale_name(name)] = _values(scale_name(name), grid).abs() * 1e-3 + 1e-4


def _values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(torch.tensor(shape).prod())
    phase = zlib.crc32(name.encode()) % 1000
    return torch.sin(torch.arange(count, dtype=torch.float64) * 0.7 + phase).to(torch.float32).reshape(shape)


def _product(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = codes.shape
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return codes.to(torch.float32) * spread


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


@pytest.fixture
def access(hub: Any, tmp_path: Path) -> HubAccess:
    """Access to the hub on this machine, with an empty cache, that waits little before it asks again."""
    return HubAccess(endpoint=hub.endpoint, cache_dir=tmp_path / "cache", first_delay_s=0.01, timeout_s=60)

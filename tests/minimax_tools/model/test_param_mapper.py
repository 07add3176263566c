from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.model.architecture import ARCHITECTURES, Architecture, ParamMapper

LLAMA_LIKE = ["minimax_m2", "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]


def part_of(name: str, model_type: str | Architecture) -> str | int | None:
    """The one part that a tensor belongs to; two would be a fault."""
    parts: list[str | int] = []
    if ParamMapper.is_embedding(name, model_type):
        parts.append("embedding")
    if ParamMapper.is_final_norm(name, model_type):
        parts.append("norm")
    if ParamMapper.is_lm_head(name, model_type):
        parts.append("head")
    layer = ParamMapper.get_layer_number(name, model_type)
    if layer is not None:
        parts.append(layer)
    assert len(parts) <= 1, parts
    return parts[0] if parts else None


@pytest.mark.parametrize("model_type", LLAMA_LIKE)
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("embed_tokens.weight", "embedding"),
        ("norm.weight", "norm"),
        ("layers.0.input_layernorm.weight", 0),
        ("layers.1.self_attn.q_proj.weight", 1),
        ("layers.10.post_attention_layernorm.weight", 10),
        ("layers.61.block_sparse_moe.experts.255.w2.weight_scale_inv", 61),
        ("layers.3.self_attn.rotary_emb.inv_freq", 3),
        *((f"lm_head.{kind}", "head") for kind in ("weight", "bias", "weight_scale_inv")),
    ],
)
def test_tensor_of_a_llama_like_model_belongs_to_its_part(
    model_type: str, name: str, part: str | int
) -> None:
    assert part_of(name, model_type) == part
    # The head lies outside the base model.
    assert part_of(f"model.{name}", model_type) == (None if part == "head" else part)


@pytest.mark.parametrize("prefix", ["transformer.", ""], ids=["causal", "base"])
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("wte.weight", "embedding"),
        ("wpe.weight", "embedding"),
        ("ln_f.weight", "norm"),
        ("ln_f.bias", "norm"),
        ("h.0.ln_1.weight", 0),
        ("h.11.attn.c_attn.bias", 11),
        ("h.11.attn.bias", 11),
    ],
)
def test_tensor_of_gpt2_belongs_to_its_part(prefix: str, name: str, part: str | int) -> None:
    assert part_of(prefix + name, "gpt2") == part


def test_only_the_token_embedding_of_gpt2_can_be_a_head() -> None:
    assert ParamMapper.is_token_embedding("transformer.wte.weight", "gpt2")
    assert not ParamMapper.is_token_embedding("transformer.wpe.weight", "gpt2")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers",
        "model.layers.1",
        "model.layers.1x.mlp.weight",
        "model.layers.-1.mlp.weight",
        "model.layers.01.mlp.weight",
        "model.layers.\u0661.mlp.weight",
        "xmodel.layers.1.mlp.weight",
        "model.layers_1.mlp.weight",
        "model.encoder.layers.0.self_attn.q_proj.weight",
        "model.mtp_layers.0.mlp.weight",
        "model.mtp.layers.0.norm.weight",
        "mtp.embed_tokens.weight",
        "model.visual.blocks.3.norm1.weight",
        "model.vision_tower.encoder.layers.7.mlp.fc1.weight",
        "model.norm_1.weight",
        "model.embed_tokens_per_layer.weight",
        "lm_head_norm.weight",
        "model.lm_head.weight",
        "transformer.h.0.ln_1.weight",
    ],
)
def test_name_that_only_resembles_a_part_belongs_to_none(name: str) -> None:
    assert part_of(name, "qwen2") is None


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.61.embed_tokens.weight", ParamMapper.is_embedding),
        ("model.layers.61.shared_head.norm.weight", ParamMapper.is_final_norm),
        ("model.layers.61.shared_head.head.weight", ParamMapper.is_lm_head),
        ("model.layers.0.input_layernorm.weight", ParamMapper.is_final_norm),
    ],
)
def test_module_inside_a_layer_is_no_part_of_its_own(name: str, role: Any) -> None:
    assert not role(name, "llama")


def test_layer_behind_the_last_predicts_further_tokens_and_is_no_decoder_layer() -> None:
    deepseek = replace(ARCHITECTURES["llama"], model_type="deepseek_v3", num_layers=61)
    assert part_of("model.layers.60.mlp.gate.weight", deepseek) == 60
    assert part_of("model.layers.61.eh_proj.weight", deepseek) is None


def test_unknown_model_type_is_named_with_the_known_ones() -> None:
    known = r"'t5'.*minimax_m2, .*llama, qwen2, qwen3, .*gpt2"
    for ask in (
        *(ParamMapper.is_embedding, ParamMapper.is_token_embedding, ParamMapper.get_layer_number),
        *(ParamMapper.is_final_norm, ParamMapper.is_lm_head),
    ):
        with pytest.raises(UsageError, match=known):
            ask("model.layers.0.mlp.weight", "t5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, "lacks a path"),
        ({"lm_heads": ("",)}, "lacks a path"),
        ({"num_layers": 0}, "num_layers is 0"),
    ],
)
def test_architecture_without_a_part_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(ARCHITECTURES["llama"], **change)

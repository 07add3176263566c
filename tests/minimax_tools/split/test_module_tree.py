from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.errors import CheckpointError
from minimax_tools.model.architecture import ARCHITECTURES, ParamMapper
from minimax_tools.split.module_tree import read_architecture

pytest.importorskip("transformers", reason="the extra `golden` is not installed")

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OTHER_SMALL: Mapping[str, dict[str, Any]] = {
    "dots1": {**SMALL, "n_routed_experts": 4, "n_shared_experts": 1},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2},
    "minimax_m3_vl": {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "text_config": SMALL,
        "vision_config": {"model_type": "minimax_m3_vl_vision", **SMALL},
    },
}
NOT_BUILT = "transformers builds no causal language model"


def write_config(folder: Path, model_type: str, **values: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **values}))
    return folder


@pytest.mark.parametrize("model_type", list(ARCHITECTURES))
def test_tree_of_a_known_model_has_the_names_known_by_heart(model_type: str, tmp_path: Path) -> None:
    found = read_architecture(write_config(tmp_path, model_type, **OTHER_SMALL.get(model_type, SMALL)))
    known = ARCHITECTURES[model_type]
    assert (found.layers, found.token_embeddings) == (known.layers, known.token_embeddings)
    assert (found.other_embeddings, found.final_norms) == (known.other_embeddings, known.final_norms)
    assert (found.lm_heads, found.num_layers) == (known.lm_heads, 3)


def test_other_architecture_is_read_from_its_tree(tmp_path: Path) -> None:
    neox = read_architecture(write_config(tmp_path, "gpt_neox", **SMALL))
    assert ParamMapper.get_layer_number("gpt_neox.layers.2.attention.dense.bias", neox) == 2
    assert ParamMapper.is_embedding("gpt_neox.embed_in.weight", neox)
    assert ParamMapper.is_final_norm("gpt_neox.final_layer_norm.bias", neox)
    assert ParamMapper.is_lm_head("embed_out.weight", neox)
    assert not ParamMapper.is_embedding("embed_out.weight", neox)


def test_norm_behind_an_embedding_belongs_to_the_embedding(tmp_path: Path) -> None:
    bloom = read_architecture(write_config(tmp_path, "bloom", hidden_size=32, n_layer=3, n_head=4))
    assert ParamMapper.is_embedding("transformer.word_embeddings_layernorm.weight", bloom)
    assert not ParamMapper.is_token_embedding("transformer.word_embeddings_layernorm.weight", bloom)
    assert not ParamMapper.is_final_norm("transformer.word_embeddings_layernorm.weight", bloom)
    assert ParamMapper.is_final_norm("transformer.ln_f.weight", bloom)


def test_vision_tower_beside_a_decoder_is_no_part_of_it(tmp_path: Path) -> None:
    # Its hub names differ from those of the tree; vision and text have equally many layers.
    gemma = read_architecture(
        write_config(
            tmp_path,
            "gemma3",
            architectures=["Gemma3ForConditionalGeneration"],
            text_config={"model_type": "gemma3_text", **SMALL, "head_dim": 8},
            vision_config={"model_type": "siglip_vision_model", **SMALL, "image_size": 28, "patch_size": 14},
        )
    )
    assert ParamMapper.get_layer_number("language_model.model.layers.2.mlp.up_proj.weight", gemma) == 2
    assert ParamMapper.get_layer_number("language_model.model.layers.3.mlp.up_proj.weight", gemma) is None
    vision = "vision_tower.vision_model.encoder.layers.2.mlp.fc1.weight"
    assert ParamMapper.get_layer_number(vision, gemma) is None
    assert ParamMapper.get_layer_number("model." + vision, gemma) is None
    assert ParamMapper.is_embedding("language_model.model.embed_tokens.weight", gemma)
    assert not ParamMapper.is_embedding("vision_tower.vision_model.embeddings.patch_embedding.weight", gemma)


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("t5", {"architectures": ["T5ForConditionalGeneration"], "d_model": 32}, "not a decoder"),
        ("bert", {**SMALL, "is_decoder": True}, "0 lists of 3 layers"),
        ("opt", {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 16}, "project_out, neither"),
        ("no_such_model", {}, NOT_BUILT),
        ("llama", {**SMALL, "num_attention_heads": 0}, NOT_BUILT),
        ("llama", {**SMALL, "num_attention_heads": "x"}, NOT_BUILT),
        ("llama", {**SMALL, "architectures": ["T5ForConditionalGeneration"]}, NOT_BUILT),
    ],
)
def test_model_that_is_no_stack_of_layers_is_refused(
    model_type: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_architecture(write_config(tmp_path, model_type, **values))


def test_config_that_names_a_function_of_transformers_calls_none_and_one_is_needed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        read_architecture(tmp_path)
    folder = write_config(tmp_path, "llama", **SMALL, architectures=["pipeline", "AutoModel"])
    assert read_architecture(folder).layers == ARCHITECTURES["llama"].layers

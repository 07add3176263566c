from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.errors import CheckpointError
from minimax_tools.split.causal_part import Division, Implementation, make_causal_config, read_causal_config

BF16 = Implementation(dtype=torch.bfloat16)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def config_of(model_type: str, **others: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**SIZES, **others})


def test_config_of_the_caller_is_not_changed() -> None:
    config = config_of("llama", dtype="float32", quantization_config={"quant_method": "fp8"})
    Division.of(config, BF16)
    assert config.dtype == torch.float32
    assert config.quantization_config


def test_model_that_changes_hidden_states_outside_its_layers_is_refused() -> None:
    # Its decoder scales what it is given.
    config = config_of("ctrl", n_layer=4, n_head=4, n_embd=32, dff=48)
    with pytest.raises(CheckpointError, match="CTRLLMHeadModel cannot be split"):
        Division.of(config, BF16)


def test_model_that_writes_no_text_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match="causal language model of type 'vit'"):
            Division.of(config_of("vit"), BF16)


def test_head_that_is_not_tied_is_told() -> None:
    assert Division.of(config_of("llama", tie_word_embeddings=False), BF16).tied_head is None
    assert Division.of(config_of("gpt2", tie_word_embeddings=True), BF16).tied_head == "lm_head.weight"


# transformers raises a class of its own for the second.
UNUSABLE = [{"model_type": "unheard-of"}, {"model_type": "llama", "num_attention_heads": "x"}]


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", *map(json.dumps, UNUSABLE)])
def test_config_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config.json cannot be used"):
        read_causal_config(tmp_path)
    for values in UNUSABLE:
        with pytest.raises(CheckpointError, match="the config in here cannot be used"):
            make_causal_config(values, where=Path("here"))


def test_config_that_asks_for_code_of_its_own_runs_none(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "trap.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="config.json cannot be used"):
        read_causal_config(tmp_path)
    assert not (tmp_path / "mark").exists()

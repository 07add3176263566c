from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.errors import CheckpointError
from minimax_tools.model.span import Span
from minimax_tools.split.causal_part import Division, Implementation, make_causal_config, read_causal_config
from minimax_tools.split.parts import Part, Role

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


def load(config: Any, layers: range, state: dict[str, torch.Tensor]) -> Any:
    role = Role.BOTTOM if layers.start == 0 else Role.TOP if layers.stop == 4 else Role.TRUNK
    part = Part(role=role, span=Span(layers.start, layers.stop), num_hidden_layers=4)
    division = Division.of(config, BF16)
    own = {*division.before} if part.has_embedding else set()
    own |= {*division.after} if part.has_head else set()
    decoder = division.layers.rpartition(".")[0] + "."

    def is_own(name: str) -> bool:
        if name.startswith(f"{division.layers}."):
            return int(name.removeprefix(f"{division.layers}.").split(".")[0]) in part.layers
        if name.startswith(decoder):
            return name.removeprefix(decoder).split(".")[0] in own
        return part.has_head

    tensors = {name: tensor for name, tensor in state.items() if is_own(name)}
    return division.load(part, tensors, where=Path("here"), device=torch.device("cpu")).model


def whole_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def test_config_of_the_caller_is_not_changed() -> None:
    config = config_of("llama", dtype="float32", quantization_config={"quant_method": "fp8"})
    Division.of(config, BF16)
    assert config.dtype == torch.float32
    assert config.quantization_config


@pytest.mark.parametrize(
    ("model_type", "others"),
    [
        ("bloom", {}),
        ("cohere", {}),
        ("falcon", {}),
        ("gemma2", {"head_dim": 8}),
        ("gpt_neox", {}),
        ("gpt_oss", {"head_dim": 8}),
        ("mistral", {}),
        # Its final norm stands before its layers, where modules are listed.
        ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
        ("phi", {}),
    ],
)
def test_architectures_that_pass_the_proof_chain_to_the_whole_models_logits(
    model_type: str, others: dict[str, Any]
) -> None:
    config = config_of(model_type, **others)
    whole = whole_model(config)
    state = whole.state_dict()
    input_ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    states = {"input_ids": input_ids}
    with torch.no_grad():
        for layers in (range(0, 1), range(1, 3), range(3, 4)):
            model = load(config, layers, state)
            if layers.stop < 4:
                states = {"inputs_embeds": model.base_model(**states, attention_mask=mask).last_hidden_state}
        logits = model(**states, attention_mask=mask).logits
        assert torch.equal(logits, whole(input_ids, attention_mask=mask).logits)


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


def test_what_transformers_keeps_in_float32_stays_so() -> None:
    config = config_of(
        "deepseek_v3",
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
        moe_intermediate_size=16,
    )
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    state = whole_model(config).state_dict()
    assert load(config, range(1, 2), state).state_dict()[name].dtype == torch.float32


def test_buffers_that_no_checkpoint_holds_are_computed() -> None:
    config = config_of("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    whole = whole_model(config)
    found = dict(load(config, range(1, 3), whole.state_dict()).named_buffers())
    expected = dict(whole.named_buffers())
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_head_that_is_not_tied_is_told() -> None:
    assert Division.of(config_of("llama", tie_word_embeddings=False), BF16).tied_head is None
    assert Division.of(config_of("gpt2", tie_word_embeddings=True), BF16).tied_head == "lm_head.weight"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        "[]",
        '{"model_type": "unheard-of"}',
        "{}",
        # transformers raises a class of its own for this one.
        '{"model_type": "llama", "num_attention_heads": "x"}',
    ],
)
def test_config_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config.json cannot be used"):
        read_causal_config(tmp_path)


def test_config_that_asks_for_code_of_its_own_runs_none(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "trap.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="config.json cannot be used"):
        read_causal_config(tmp_path)
    assert not (tmp_path / "mark").exists()


def test_unknown_model_type_is_refused() -> None:
    for values in ({"model_type": "unheard-of"}, {"model_type": "llama", "num_attention_heads": "x"}):
        with pytest.raises(CheckpointError, match="the config in here cannot be used"):
            make_causal_config(values, where=Path("here"))

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from minimax_tools.errors import CheckpointError
from minimax_tools.model.span import Span
from minimax_tools.split.causal_model import Implementation
from minimax_tools.split.causal_part import ModelPart, build_part
from minimax_tools.split.parts import Part, Role
from minimax_tools.stored_dtype import FLOAT32, StoredDtype

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


def build(config: Any, layers: range, *, implementation: Implementation = BF16) -> ModelPart:
    role = Role.BOTTOM if layers.start == 0 else Role.TOP if layers.stop == 4 else Role.TRUNK
    part = Part(role=role, span=Span(layers.start, layers.stop), num_hidden_layers=4)
    return build_part(config, part, implementation)


def whole_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def test_part_has_slots_for_its_layers_alone() -> None:
    slots = build(config_of("gpt2"), range(1, 3)).slots()
    assert {name.split(".")[2] for name in slots} == {"1", "2"}
    assert slots["transformer.h.1.attn.c_attn.weight"].shape == (32, 96)


def test_nothing_is_allocated_for_weights() -> None:
    part = build(config_of("llama"), range(0, 2))
    assert all(parameter.is_meta for parameter in part.model.parameters())


def test_config_of_the_caller_is_not_changed() -> None:
    config = config_of("llama", dtype="float32")
    build(config, range(0, 2))
    assert config.dtype == torch.float32


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
            part = build(config, layers)
            model = part.take({name: state[name] for name in part.slots()}, device=torch.device("cpu")).model
            if layers.stop < 4:
                states = {"inputs_embeds": model.base_model(**states, attention_mask=mask).last_hidden_state}
        logits = model(**states, attention_mask=mask).logits
        assert torch.equal(logits, whole(input_ids, attention_mask=mask).logits)


def test_model_that_changes_hidden_states_outside_its_layers_is_refused() -> None:
    # Its decoder scales what it is given.
    config = config_of("ctrl", n_layer=4, n_head=4, n_embd=32, dff=48)
    with pytest.raises(CheckpointError, match="CTRLLMHeadModel cannot be split"):
        build(config, range(1, 3))


def test_model_that_writes_no_text_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match="causal language model of type 'vit'"):
            build(config_of("vit"), range(1, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_router_of_minimax_m2_has_float32_slots(dtype: torch.dtype) -> None:
    config = config_of("minimax_m2", num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    slots = build(config, range(1, 2), implementation=Implementation(dtype=dtype)).slots()
    assert slots["model.layers.1.mlp.gate.weight"].dtype == FLOAT32
    assert slots["model.layers.1.mlp.e_score_correction_bias"].dtype == FLOAT32
    assert slots["model.layers.1.mlp.experts.gate_up_proj"].dtype == StoredDtype.of(dtype)


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
    assert build(config, range(1, 2)).slots()[name].dtype == FLOAT32


def test_buffers_that_no_checkpoint_holds_are_computed() -> None:
    config = config_of("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    whole = whole_model(config)
    part = build(config, range(1, 3))
    state = whole.state_dict()
    model = part.take({name: state[name] for name in part.slots()}, device=torch.device("cpu")).model
    expected = dict(whole.named_buffers())
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_names_tell_prefix_layers_and_tie() -> None:
    names = build(config_of("gpt2", tie_word_embeddings=True), range(3, 4)).names
    assert (names.prefix, names.layers) == ("transformer", "transformer.h")
    assert names.tied["lm_head.weight"] == "transformer.wte.weight"
    assert names.is_ignored("h.0.attn.bias")
    assert not names.is_ignored("h.0.attn.surprise")


def test_head_that_is_not_tied_has_no_other_source() -> None:
    assert not build(config_of("llama", tie_word_embeddings=False), range(3, 4)).names.tied

"""Traps planted in a sound golden: each is refused by its name."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.golden.golden import Golden, open_golden
from gpu_reference.model.model_checks import prove_model, refuse_ragged_blocks
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import GoldenRefusedError
from minimax_tools.model.spec import ModelSpec


class Subject:
    """A loaded golden model that may be damaged, and its certification."""

    def __init__(self, model: Any, folder: Path, reader: CheckpointReader) -> None:
        self.model = model
        self.spec = ModelSpec.from_folder(folder)
        self.reader = reader

    def layer(self, index: int) -> Any:
        return self.model.get_submodule(f"model.layers.{index}")

    def certify(self) -> tuple[str, ...]:
        return prove_model(self.model, spec=self.spec, reader=self.reader, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def sound(ask: Any) -> Iterator[Golden]:
    with open_golden(ask()) as golden:
        yield golden


@pytest.fixture
def subject(sound: Golden, toy: Path) -> Iterator[Subject]:
    """A sound model that is the test's own to damage."""
    with CheckpointReader(toy) as reader:
        yield Subject(copy.deepcopy(sound.model), toy, reader)


def parameter(value: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value, requires_grad=False)


def next_float(value: torch.Tensor) -> torch.Tensor:
    """Move every value one unit in the last place away from zero."""
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[value.dtype]
    return (value.view(bits) + 1).view(value.dtype)


def test_sound_golden_proves_all_four(subject: Subject) -> None:
    assert subject.certify() == (
        "no_fp8_arithmetic",
        "rotary_width",
        "float32_router",
        "weights_match_checkpoint",
    )


@pytest.mark.parametrize("layer", [0, 3])
def test_correction_bias_in_bfloat16_is_refused(subject: Subject, layer: int) -> None:
    moe = subject.layer(layer).mlp
    moe.e_score_correction_bias = moe.e_score_correction_bias.bfloat16()
    message = rf"layer {layer}: .*e_score_correction_bias was rounded: expected float32, .* torch.bfloat16"
    with pytest.raises(GoldenRefusedError, match=message):
        subject.certify()


def test_correction_bias_rounded_and_cast_back_is_refused(subject: Subject) -> None:
    moe = subject.layer(1).mlp
    moe.e_score_correction_bias = moe.e_score_correction_bias.bfloat16().float()
    message = r"layer 1: .*e_score_correction_bias differs from the checkpoint: found largest difference"
    with pytest.raises(GoldenRefusedError, match=message):
        subject.certify()


def test_gate_off_by_one_unit_is_refused(subject: Subject) -> None:
    gate = subject.layer(0).mlp.gate
    gate.weight = parameter(next_float(gate.weight))
    with pytest.raises(GoldenRefusedError, match=r"layer 0: .*gate.weight differs from the checkpoint"):
        subject.certify()


def test_rotation_of_whole_heads_is_refused(subject: Subject) -> None:
    # What transformers before 5.23 does: it ignores rotary_dim.
    dim, theta = subject.spec.head_dim, subject.spec.rope_theta
    subject.model.model.rotary_emb.inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2) / dim)
    message = (
        r"rotates the wrong width: expected rotary_dim 32, found 64 of head_dim 64\. .*transformers>=5\.23"
    )
    with pytest.raises(GoldenRefusedError, match=message):
        subject.certify()


def test_rotation_with_another_theta_is_refused(subject: Subject) -> None:
    dim = subject.spec.rotary_dim
    subject.model.model.rotary_emb.inv_freq = 1.0 / 10_000 ** (torch.arange(0, dim, 2) / dim)
    with pytest.raises(GoldenRefusedError, match=r"wrong frequencies: expected theta 5e\+06"):
        subject.certify()


def test_scaled_rotation_is_refused(subject: Subject) -> None:
    subject.model.model.rotary_emb.attention_scaling = 1.2
    with pytest.raises(GoldenRefusedError, match=r"wrong frequencies: .* scaling 1\.2"):
        subject.certify()


def test_fp8_linear_is_refused(subject: Subject) -> None:
    projection = subject.layer(3).self_attn.v_proj
    projection.weight = parameter(projection.weight.to(torch.float8_e4m3fn))
    message = r"layers\.3\.self_attn\.v_proj\.weight is held in torch\.float8_e4m3fn: .* found FP8 matmuls"
    with pytest.raises(GoldenRefusedError, match=message):
        subject.certify()


@pytest.mark.parametrize("path", ["model.embed_tokens", "model.layers.1.input_layernorm", "lm_head"])
def test_weight_in_another_dtype_than_asked_for_is_refused(subject: Subject, path: str) -> None:
    module = subject.model.get_submodule(path)
    module.weight = parameter(module.weight.float())
    message = (
        rf"{path}\.weight was loaded in another dtype .*: expected torch\.bfloat16, found torch\.float32"
    )
    with pytest.raises(GoldenRefusedError, match=message):
        subject.certify()


def test_weight_with_scales_is_refused(subject: Subject) -> None:
    subject.layer(1).self_attn.q_proj.weight_scale_inv = parameter(torch.ones(4, 2))
    with pytest.raises(GoldenRefusedError, match=r"q_proj\.weight_scale_inv is held"):
        subject.certify()


@pytest.mark.parametrize(
    "path",
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.k_norm"],
)
def test_attention_weight_off_by_one_unit_is_refused(subject: Subject, path: str) -> None:
    module = subject.layer(2).get_submodule(path)
    module.weight = parameter(module.weight.clone())
    module.weight.view(-1)[:1] = next_float(module.weight.view(-1)[:1])
    with pytest.raises(GoldenRefusedError, match=rf"layer 2: {path}\.weight differs from the checkpoint's"):
        subject.certify()


@pytest.mark.parametrize(
    ("weight", "rows", "name"),
    [
        ("gate_up_proj", slice(0, 128), "w1"),
        ("gate_up_proj", slice(128, 256), "w3"),
        ("down_proj", slice(None), "w2"),
    ],
)
def test_expert_dequantised_with_another_scale_is_refused(
    subject: Subject, weight: str, rows: slice, name: str
) -> None:
    experts = subject.layer(0).mlp.experts
    getattr(experts, weight).data[-1, rows] *= 2
    message = rf"layer 0: block_sparse_moe\.experts\.31\.{name}\.weight differs from the checkpoint's"
    with pytest.raises(GoldenRefusedError, match=message):
        subject.certify()


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_model_as_transformers_loads_it_is_refused(
    toy_bf16: Path, tmp_path: Path, is_offloaded: bool
) -> None:
    from transformers import MiniMaxM2ForCausalLM

    device_map = {"": "disk"} if is_offloaded else {"": "cpu"}
    model = MiniMaxM2ForCausalLM.from_pretrained(
        toy_bf16, dtype=torch.bfloat16, device_map=device_map, offload_folder=str(tmp_path)
    )
    with CheckpointReader(toy_bf16) as reader:
        with pytest.raises(GoldenRefusedError, match=r"layer 0: .*gate.weight was rounded"):
            Subject(model, toy_bf16, reader).certify()


def ragged(toy: Path, **changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**json.loads((toy / "config.json").read_text()), **changes})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"hidden_size": 200}, "hidden_size is 200"),
        ({"intermediate_size": 192}, "intermediate_size is 192"),
        (
            {"num_attention_heads": 6, "head_dim": 32, "rotary_dim": 16},
            "num_attention_heads × head_dim is 192",
        ),
        ({"num_key_value_heads": 4, "head_dim": 40}, "num_key_value_heads × head_dim is 160"),
    ],
)
def test_fp8_width_that_is_no_multiple_of_128_is_refused(
    toy: Path, changes: dict[str, int], found: str
) -> None:
    with pytest.raises(
        GoldenRefusedError, match="wrong blocks: expected widths that are multiples of 128"
    ) as error:
        refuse_ragged_blocks(ragged(toy, **changes))
    assert found in str(error.value)


def test_fp8_width_of_less_than_a_block_is_accepted(toy: Path) -> None:
    refuse_ragged_blocks(ragged(toy, intermediate_size=72))


def test_ragged_fp8_checkpoint_is_refused_before_it_is_loaded(ask: Any, toy: Path, tmp_path: Path) -> None:
    config = json.loads((toy / "config.json").read_text())
    for shard in toy.glob("model*"):
        (tmp_path / shard.name).symlink_to(shard)
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 192}))
    with pytest.raises(GoldenRefusedError, match="intermediate_size is 192"):
        with open_golden(ask(folder=tmp_path)):
            pass

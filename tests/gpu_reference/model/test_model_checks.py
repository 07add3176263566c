"""Traps planted in a sound golden: each is refused by its name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
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


def next_float(value: torch.Tensor) -> torch.Tensor:
    """Move every value one unit in the last place away from zero."""
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[value.dtype]
    return (value.view(bits) + 1).view(value.dtype)


def first_off(value: torch.Tensor) -> torch.Tensor:
    changed = value.clone()
    changed.view(-1)[:1] = next_float(changed.view(-1)[:1])
    return changed


def last_doubled(rows: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """Double rows of the last expert, as another scale does."""

    def double(experts: torch.Tensor) -> torch.Tensor:
        changed = experts.clone()
        changed[-1, rows] *= 2
        return changed

    return double


def frequencies(width: int, theta: float) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, width, 2) / width)


def test_sound_golden_proves_all_four(subject: Subject) -> None:
    proved = ("no_fp8_arithmetic", "rotary_width", "float32_router", "weights_match_checkpoint")
    assert subject.certify() == proved


BIAS = "mlp.e_score_correction_bias"
ROUNDED = r"e_score_correction_bias was rounded: expected float32, .* torch.bfloat16"
ANOTHER_DTYPE = r"was loaded in another dtype .*: expected torch\.bfloat16, found torch\.float32"
EXPERTS = "layers.0.mlp.experts"
EXPERT = r"layer 0: block_sparse_moe\.experts\.31"
DIFFERS = r"differs from the checkpoint's"


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (f"layers.0.{BIAS}", torch.Tensor.bfloat16, f"layer 0: .*{ROUNDED}"),
        (f"layers.3.{BIAS}", torch.Tensor.bfloat16, f"layer 3: .*{ROUNDED}"),
        (
            f"layers.1.{BIAS}",
            lambda bias: bias.bfloat16().float(),
            "layer 1: .*e_score_correction_bias differs from the checkpoint: found largest difference",
        ),
        ("layers.0.mlp.gate.weight", next_float, r"layer 0: .*gate.weight differs from the checkpoint"),
        # What transformers before 5.23 does: it ignores rotary_dim.
        (
            "rotary_emb.inv_freq",
            lambda _: frequencies(64, 5e6),
            r"the wrong width: expected rotary_dim 32, found 64 of head_dim 64\. .*transformers>=5\.23",
        ),
        ("rotary_emb.inv_freq", lambda _: frequencies(32, 1e4), r"wrong frequencies: expected theta 5e\+06"),
        ("rotary_emb.attention_scaling", lambda _: 1.2, r"wrong frequencies: .* scaling 1\.2"),
        (
            "layers.3.self_attn.v_proj.weight",
            lambda weight: weight.to(torch.float8_e4m3fn),
            r"3\.self_attn\.v_proj\.weight is held in torch\.float8_e4m3fn: .* found FP8 matmuls",
        ),
        (
            "layers.1.self_attn.q_proj.weight_scale_inv",
            lambda _: torch.nn.Parameter(torch.ones(4, 2)),
            r"q_proj\.weight_scale_inv is held",
        ),
        ("embed_tokens.weight", torch.Tensor.float, rf"model\.embed_tokens\.weight {ANOTHER_DTYPE}"),
        (
            "layers.1.input_layernorm.weight",
            torch.Tensor.float,
            rf"model\.layers\.1\.input_layernorm\.weight {ANOTHER_DTYPE}",
        ),
        *(
            (f"layers.2.self_attn.{name}.weight", first_off, rf"layer 2: self_attn\.{name}\.weight {DIFFERS}")
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "k_norm")
        ),
        (f"{EXPERTS}.gate_up_proj", last_doubled(slice(0, 128)), rf"{EXPERT}\.w1\.weight {DIFFERS}"),
        (f"{EXPERTS}.gate_up_proj", last_doubled(slice(128, 256)), rf"{EXPERT}\.w3\.weight {DIFFERS}"),
        (f"{EXPERTS}.down_proj", last_doubled(slice(None)), rf"{EXPERT}\.w2\.weight {DIFFERS}"),
    ],
)
def test_planted_trap_is_refused(subject: Subject, path: str, change: Any, message: str) -> None:
    owner, _, name = path.rpartition(".")
    module = subject.model.get_submodule(f"model.{owner}")
    value = getattr(module, name, None)
    changed = change(value)
    if isinstance(value, torch.nn.Parameter):
        changed = torch.nn.Parameter(changed, requires_grad=False)
    setattr(module, name, changed)
    with pytest.raises(GoldenRefusedError, match=message):
        subject.certify()


def test_head_in_another_dtype_than_asked_for_is_refused(subject: Subject) -> None:
    subject.model.lm_head.float()
    with pytest.raises(GoldenRefusedError, match=rf"lm_head\.weight {ANOTHER_DTYPE}"):
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

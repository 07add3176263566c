from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.errors import CheckpointError
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.toy_model import SyntheticModel

CONFIG = {name: value for name, value in SyntheticModel.m2().spec().raw.items() if name != "attn_type_list"}
KNOWN_TYPES = " or ".join(map(repr, FAMILIES))


def config(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**CONFIG, **changes}.items() if value != "absent"}


def write(folder: Path, text: str) -> Path:
    (folder / "config.json").write_text(text)
    return folder


def test_widths_follow_from_heads() -> None:
    spec = ModelSpec.from_config(config())
    assert (spec.query_width, spec.key_value_width) == (6144, 1024)
    # A head's width may be left to the hidden size, and the rotary one be told as a share of it.
    assert ModelSpec.from_config(config(head_dim="absent")).head_dim == 64
    share = ModelSpec.from_config(config(rotary_dim="absent", partial_rotary_factor=0.25))
    assert (share.rotary_dim, share.rope_theta) == (32, 5e6)


def test_spec_is_read_from_a_checkpoint(toy: Path) -> None:
    assert ModelSpec.from_folder(toy) == SyntheticModel().spec()


def test_digest_knows_quantities_only() -> None:
    spec = ModelSpec.from_config(config())
    quantised = ModelSpec.from_config(config(quantization_config={"quant_method": "fp8"}, torch_dtype="x"))
    assert quantised.digest() == spec.digest()
    assert quantised == spec
    assert ModelSpec.from_config(config(rope_theta=10000)).digest() != spec.digest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, f"another model: expected model_type {KNOWN_TYPES}, found 'llama'"),
        ({"scoring_func": "softmax"}, "sets scoring_func: expected 'sigmoid', found 'softmax'"),
        ({"vocab_size": "absent"}, "has no 'vocab_size'"),
        ({"rope_theta": "absent"}, "has no 'rope_theta'"),
        ({"num_local_experts": 0}, "num_local_experts is 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"intermediate_size": 1536.0}, "intermediate_size is 1536.0"),
        ({"hidden_size": "wide", "head_dim": "absent"}, "cannot be understood"),
        ({"rms_norm_eps": "small"}, "cannot be understood"),
        ({"num_key_value_heads": 7}, "48 heads do not divide by 7 kv heads"),
        ({"rotary_dim": 63}, "rotary_dim 63 is odd or wider than head_dim 128"),
        ({"rotary_dim": 256}, "rotary_dim 256 is odd or wider than head_dim 128"),
        ({"num_experts_per_tok": 257}, "257 experts per token of 256"),
        # All faults are told at once.
        (
            {"rotary_dim": 63, "num_experts_per_tok": 257},
            "rotary_dim 63 is odd or wider than head_dim 128; 257",
        ),
    ],
)
def test_config_of_no_minimax_m2_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        ModelSpec.from_config(config(**changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[]", "holds no JSON object"), ("\x00", "cannot be read")],
)
def test_damaged_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json {message}"):
        ModelSpec.from_folder(write(tmp_path, text))


def test_missing_folder_and_missing_config_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found no config.json"):
        ModelSpec.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="found no such folder"):
        ModelSpec.from_folder(tmp_path / "absent")


def test_raw_config_is_kept_and_cannot_be_changed(tmp_path: Path) -> None:
    spec = ModelSpec.from_folder(write(tmp_path, json.dumps(config(use_mtp=True))))
    assert spec.raw["use_mtp"] is True
    with pytest.raises(TypeError):
        spec.raw["use_mtp"] = False  # type: ignore[index]  # what must not be possible

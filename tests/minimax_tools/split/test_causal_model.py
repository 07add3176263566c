from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minimax_tools.errors import CheckpointError
from minimax_tools.split.causal_model import (
    Implementation,
    is_quantised,
    load_whole,
    make_causal_config,
    read_causal_config,
)

BF16 = Implementation(dtype=torch.bfloat16)


def test_config_is_read_and_tells_of_fp8(toy: Path, toy_bf16: Path) -> None:
    assert read_causal_config(toy).model_type == "minimax_m2"
    assert is_quantised(read_causal_config(toy))
    assert not is_quantised(read_causal_config(toy_bf16))


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


def test_whole_model_is_dequantised_and_ready(toy: Path) -> None:
    model = load_whole(toy, read_causal_config(toy), implementation=BF16, show_progress=False)
    assert not model.training
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16
    assert not any(tensor.dtype == torch.float8_e4m3fn for tensor in model.parameters())


def test_progress_bar_shows_where_it_is_asked_for(toy_bf16: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for shown in (False, True):
        load_whole(toy_bf16, read_causal_config(toy_bf16), implementation=BF16, show_progress=shown)
        assert ("Loading weights" in capfd.readouterr().err) == shown


def test_checkpoint_that_is_not_there_is_refused(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="transformers cannot load"):
        load_whole(tmp_path, read_causal_config(toy), implementation=BF16, show_progress=False)

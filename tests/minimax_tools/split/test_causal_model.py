from __future__ import annotations

import json
from pathlib import Path

import pytest

from minimax_tools.errors import CheckpointError
from minimax_tools.split.causal_model import make_causal_config, read_causal_config


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

"""A model of two small layers that has learnt for a few steps, and the text it learnt from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from minimax_tools.synthetic.learned import LearnedModel, train_checkpoint
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.training import TrainingOptions

# Kv heads and experts enough that an exchange of two shows.
SMALL = SyntheticModel(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    rotary_dim=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    intermediate_size=32,
    vocab_size=262,
)
BRIEF = TrainingOptions(
    num_steps=30, minutes=None, batch_size=4, seq_len=64, learning_rate=8e-3, bias_rate=0.003, seed=0
)


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> LearnedModel:
    """The model in BF16, block FP8 and float32, in this order of its folders."""
    root = tmp_path_factory.mktemp("learned")
    text = root / "text"
    text.write_text("".join(path.read_text() for path in sorted(Path(asyncio.__file__).parent.glob("b*.py"))))
    outputs = {
        root / "bf16": torch.bfloat16,
        root / "fp8": torch.float8_e4m3fn,
        root / "float32": torch.float32,
    }
    return train_checkpoint(outputs, model=SMALL, texts=(str(text),), options=BRIEF)


@pytest.fixture(scope="session")
def learned_bf16(learned: LearnedModel) -> Path:
    return learned.folders[0]


@pytest.fixture(scope="session")
def learned_float32(learned: LearnedModel) -> Path:
    return learned.folders[2]

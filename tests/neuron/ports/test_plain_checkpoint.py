from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.layer_tensors import ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.model.spec import ModelSpec
from neuron.ports.vllm_neuron_model import plain_checkpoint


def test_the_copy_of_an_fp8_checkpoint_has_its_values_and_no_scales(toy: Path) -> None:
    spec = ModelSpec.from_folder(toy)
    with CheckpointReader(toy) as reader, plain_checkpoint(reader, spec, dtype=torch.bfloat16) as folder:
        expected = ModelTensors.open(reader, spec, torch.bfloat16)
        with CheckpointReader(folder) as copied:
            assert set(copied.index.names) == set(expected)
            for name in expected:
                assert copied.index[name].dtype.as_torch() is expected[name].dtype
                assert torch.equal(copied.read(name), expected[name])
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        ModelSpec.from_folder(folder)
    assert not folder.exists()


def test_a_checkpoint_without_fp8_is_read_where_it_lies(copies: dict[torch.dtype, Path]) -> None:
    checkpoint = copies[torch.bfloat16]
    spec = ModelSpec.from_folder(checkpoint)
    with (
        CheckpointReader(checkpoint) as reader,
        plain_checkpoint(reader, spec, dtype=torch.bfloat16) as folder,
    ):
        assert folder == checkpoint


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    spec = ModelSpec.from_folder(toy)
    with (
        CheckpointReader(toy) as reader,
        pytest.raises(CheckpointError, match="too small for a copy of the checkpoint without FP8") as raised,
        plain_checkpoint(reader, spec, dtype=torch.bfloat16),
    ):
        pass
    assert "Set TMPDIR" in str(raised.value)

from __future__ import annotations

from pathlib import Path

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.model.inputs import pad_rows
from neuron.replacement.run_folder import RunFolder, RunPlan

PLAN = RunPlan(
    tool="nxdi",
    golden_digest="0" * 64,
    model_name="model",
    num_layers=2,
    hidden_size=8,
    vocab_size=32,
    num_decoded=1,
    bucket=16,
)
INPUTS = pad_rows([[5, 6, 7], [8, 9]], padding_side="right", buckets=(), pad_token_id=0, source="a test")


def test_killed_run_that_was_writing_the_folder_is_gone_on_with(tmp_path: Path) -> None:
    directory = tmp_path / "runs"
    RunFolder.create(directory, PLAN, INPUTS)
    folder, is_new = RunFolder.create(directory, PLAN, INPUTS)
    assert is_new
    folder.finish()
    assert sorted(path.name for path in directory.iterdir()) == [
        "inputs.safetensors",
        "logits",
        "replacement.json",
    ]
    assert not RunFolder.create(directory, PLAN, INPUTS)[1]


def test_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logits").mkdir()
    with pytest.raises(UsageError, match="holds something else"):
        RunFolder.create(tmp_path, PLAN, INPUTS)

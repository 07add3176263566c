from __future__ import annotations

import json
from pathlib import Path

import pytest

from minimax_tools.errors import CaptureError, UsageError
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


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_decoded": -1}, "num_decoded is -1"),
        ({"vocab_size": 10**400}, "vocab_size is 1000"),
        ({"schema_version": 2}, "version 2"),
        ({"bucket": True}, "expected a whole number, found True"),
    ],
)
def test_damaged_plan_is_refused_by_name(tmp_path: Path, changed: dict[str, object], found: str) -> None:
    folder, _ = RunFolder.create(tmp_path / "runs", PLAN, INPUTS)
    folder.finish()
    path = folder.directory / "replacement.json"
    whole = json.loads(path.read_text())
    for record in ({**whole, **changed}, [whole], 3):
        path.write_text(json.dumps(record))
        with pytest.raises(CaptureError, match=r"replacement\.json cannot be read") as caught:
            RunFolder.open(folder.directory)
        if isinstance(record, dict):
            assert found in str(caught.value.found)


def test_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logits").mkdir()
    with pytest.raises(UsageError, match="holds something else"):
        RunFolder.create(tmp_path, PLAN, INPUTS)

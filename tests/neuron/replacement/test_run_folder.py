from __future__ import annotations

import json
from pathlib import Path

import pytest

from minimax_tools.errors import CaptureError
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


def make(directory: Path) -> RunFolder:
    return RunFolder.make(directory, PLAN, INPUTS, write=lambda _: None)


def test_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    directory = tmp_path / "runs"

    def fail(folder: RunFolder) -> None:
        assert folder.read_inputs().lengths == INPUTS.lengths
        raise CaptureError("the golden cannot be read")

    with pytest.raises(CaptureError, match="the golden cannot be read"):
        RunFolder.make(directory, PLAN, INPUTS, write=fail)
    assert not directory.exists()
    make(directory)
    names = ["inputs.safetensors", "logits", "replacement.json"]
    assert sorted(path.name for path in directory.iterdir()) == names
    # What is there is not written again.
    RunFolder.make(directory, PLAN, INPUTS, write=fail)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_decoded": -1}, "num_decoded is -1"),
        ({"vocab_size": 10**400}, "vocab_size is 1000"),
        ({"schema_version": 1}, "version 1"),
        ({"bucket": True}, "expected a whole number, found True"),
    ],
)
def test_damaged_plan_is_refused_by_name(tmp_path: Path, changed: dict[str, object], found: str) -> None:
    folder = make(tmp_path / "runs")
    path = folder.directory / "replacement.json"
    whole = json.loads(path.read_text())
    for record in ({**whole, **changed}, [whole], 3):
        path.write_text(json.dumps(record))
        with pytest.raises(CaptureError, match=r"replacement\.json cannot be read") as caught:
            RunFolder.open(folder.directory)
        if isinstance(record, dict):
            assert found in str(caught.value.found)

"""A run with a replaced stream: its folder, and the golden's stream, cut for the passes of a port."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.inputs import pad_rows
from minimax_tools.model.spec import ModelSpec
from neuron.model_runs.passes import plan_passes
from neuron.replacement.run_folder import RunFolder, RunPlan
from neuron.replacement.stream import GoldenStream

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
    names = {"inputs.safetensors", "logits", "replacement.json"}
    assert {path.name for path in directory.iterdir()} == names
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


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_pass_gets_its_own_tokens(side: str) -> None:
    rows = [[5, 6, 7, 8, 9], [1, 2, 3]]
    inputs = pad_rows(rows, padding_side=side, buckets=(), pad_token_id=0, source="a test")
    # The stream of a token is its id.
    stream = (
        inputs.input_ids[..., None].expand(2, 5, 3).float() + 100 * (1 - inputs.attention_mask)[..., None]
    )
    prefill, step = plan_passes(inputs, 1)
    found = prefill.cut(stream)[..., 0].tolist()
    assert found == [[5, 6, 7, 8], [0, 0, 1, 2] if side == "left" else [1, 2, 0, 0]]
    assert step.cut(stream)[..., 0].tolist() == [[9], [3]]


def open_stream(golden: Path, model: Path) -> GoldenStream:
    with CheckpointReader(model) as reader:
        spec = ModelSpec.from_folder(model)
        return GoldenStream.open(Capture.open(golden), reader=reader, spec=spec, dtype=torch.bfloat16)


def test_golden_logits_begin_with_the_real_tokens(small_golden: Path, small_fp8: Path) -> None:
    stream = open_stream(small_golden, small_fp8)
    start, rows = stream.start(2), stream.inputs.real_rows()
    assert start.layer == 2
    for row, mask, states in zip(rows, stream.inputs.attention_mask, stream.read(2), strict=True):
        assert torch.equal(start.states[tuple(row)], states[mask.bool()])


def test_golden_of_another_model_is_refused(small_golden: Path, small: Path) -> None:
    with pytest.raises(IncomparableError, match="of another model"):
        open_stream(small_golden, small)

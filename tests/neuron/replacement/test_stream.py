"""The golden's stream, cut for the passes of a port."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import IncomparableError
from minimax_tools.model.inputs import pad_rows
from minimax_tools.model.spec import ModelSpec
from neuron.model_runs.passes import plan_passes
from neuron.replacement.stream import GoldenStream


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


@pytest.fixture
def stream(golden: Path, toy: Path) -> GoldenStream:
    return open_stream(golden, toy)


def test_golden_logits_begin_with_the_real_tokens(stream: GoldenStream) -> None:
    start, rows = stream.start(2), stream.inputs.real_rows()
    assert start.layer == 2
    for row, mask, states in zip(rows, stream.inputs.attention_mask, stream.read(2), strict=True):
        assert torch.equal(start.states[tuple(row)], states[mask.bool()])


def test_golden_of_another_model_is_refused(golden: Path, small: Path) -> None:
    with pytest.raises(IncomparableError, match="of another model"):
        open_stream(golden, small)

"""Golden logits that begin with a stream at a layer: equal to those of the whole model where the stream is its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.layer_tensors import ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.golden_logits.golden_logits import KINDS, GoldenLogits, StreamStart, divergence
from minimax_tools.golden_logits.golden_rows import compute_golden_logits
from minimax_tools.golden_logits.logits_store import LogitsStore
from minimax_tools.model.inputs import pad_rows
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING
from minimax_tools.reference.rounded_model import RoundedModel

LEARNED = Path(__file__).parents[2] / "models" / "learned"
ROWS = [(5, 9, 40, 41, 7, 88, 12), (60, 61, 62)]
NUM_LAYERS = 4


def compute(start: StreamStart | None) -> list[GoldenLogits]:
    spec = ModelSpec.from_folder(LEARNED)
    with CheckpointReader(LEARNED) as reader:
        return compute_golden_logits(RoundedModel(spec=spec, reader=reader, kinds=KINDS), ROWS, start=start)


@pytest.fixture(scope="module")
def whole() -> list[GoldenLogits]:
    return compute(None)


@pytest.fixture(scope="module")
def embedded() -> StreamStart:
    spec = ModelSpec.from_folder(LEARNED)
    with CheckpointReader(LEARNED) as reader:
        weight = ModelTensors.open(reader, spec, torch.bfloat16, with_layers=False)[EMBEDDING]
        return StreamStart(layer=0, states={row: weight[torch.tensor(row)] for row in ROWS})


@pytest.fixture(scope="module")
def last_outputs() -> StreamStart:
    """The exact copy's output of the last layer."""
    spec = ModelSpec.from_folder(LEARNED)
    with CheckpointReader(LEARNED) as reader:
        model = RoundedModel(spec=spec, reader=reader, kinds=KINDS)
        batch = pad_rows(
            list(map(list, ROWS)), padding_side="right", buckets=(), pad_token_id=0, source="rows"
        )
        (outputs,) = model.run([batch])
    return StreamStart(
        layer=NUM_LAYERS,
        states={row: states[: len(row)] for row, states in zip(ROWS, outputs[0], strict=True)},
    )


def test_embedding_as_the_stream_gives_the_whole_models_logits(
    whole: list[GoldenLogits], embedded: StreamStart
) -> None:
    for found, expected in zip(compute(embedded), whole, strict=True):
        assert torch.equal(found.exact.candidates, expected.exact.candidates)
        for one, other in zip(found.variants, expected.variants, strict=True):
            assert torch.equal(one.candidates, other.candidates)


def test_behind_all_layers_only_the_heads_noise_is_left(
    whole: list[GoldenLogits], last_outputs: StreamStart
) -> None:
    for found, expected in zip(compute(last_outputs), whole, strict=True):
        torch.testing.assert_close(found.exact.candidates, expected.exact.candidates, rtol=1e-4, atol=1e-4)
        for one, other in zip(found.variants, expected.variants, strict=True):
            assert divergence(found.exact, one).mean() < 0.3 * divergence(expected.exact, other).mean()


def test_store_keeps_logits_of_each_stream_apart(
    whole: list[GoldenLogits], embedded: StreamStart, tmp_path: Path
) -> None:
    spec = ModelSpec.from_folder(LEARNED)
    with CheckpointReader(LEARNED) as reader:
        LogitsStore.open(tmp_path, reader=reader, spec=spec).write(whole[0])
        changed = {row: states + (row == ROWS[1]) for row, states in embedded.states.items()}
        for start, is_kept in (
            (None, True),
            (embedded, False),
            (replace(embedded, layer=1), False),
            (replace(embedded, states=changed), False),
        ):
            store = LogitsStore.open(tmp_path, reader=reader, spec=spec, start=start)
            assert store.has(ROWS[0]) is is_kept
    assert (
        len(
            {
                one.digest()
                for one in (embedded, replace(embedded, layer=1), replace(embedded, states=changed))
            }
        )
        == 3
    )

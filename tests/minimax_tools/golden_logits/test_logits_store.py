"""Golden logits that are kept: read again, and computed anew where model or file changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.checkpoint.layer_tensors import ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CaptureError
from minimax_tools.golden_logits.golden_logits import KINDS, GoldenLogits, StreamStart, divergence
from minimax_tools.golden_logits.golden_rows import compute_golden_logits
from minimax_tools.golden_logits.logits_store import MODEL_FILE, LogitsStore
from minimax_tools.model.inputs import pad_rows
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING
from minimax_tools.reference.rounded_model import RoundedModel

LEARNED = Path(__file__).parents[2] / "models" / "learned"
ROWS = [(5, 9, 40, 41, 7, 88, 12), (5, 9, 40, 41, 7, 88, 12, 13, 200, 3), (60, 61)]
# Rows that begin with a stream.
STREAM_ROWS = [(5, 9, 40, 41, 7, 88, 12), (60, 61, 62)]
NUM_LAYERS = 4


def compute(rows: Sequence[tuple[int, ...]], start: StreamStart | None = None) -> list[GoldenLogits]:
    spec = ModelSpec.from_folder(LEARNED)
    with CheckpointReader(LEARNED) as reader:
        return compute_golden_logits(RoundedModel(spec=spec, reader=reader, kinds=KINDS), rows, start=start)


@pytest.fixture(scope="module")
def goldens() -> list[GoldenLogits]:
    return compute(ROWS)


@pytest.fixture(scope="module")
def whole() -> list[GoldenLogits]:
    return compute(STREAM_ROWS)


def open_store(folder: Path, model: Path = LEARNED) -> LogitsStore:
    with CheckpointReader(model) as reader:
        return LogitsStore.open(folder, reader=reader, spec=ModelSpec.from_folder(model))


def test_stored_logits_are_read_as_written(goldens: list[GoldenLogits], tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert not store.has(ROWS[0])
    store.write(goldens[0])
    found = open_store(tmp_path).read(ROWS[0])
    assert torch.equal(found.candidates, goldens[0].candidates)
    for kept, computed in zip(
        (found.exact, *found.variants), (goldens[0].exact, *goldens[0].variants), strict=True
    ):
        assert torch.equal(kept.candidates, computed.candidates)
        assert torch.equal(kept.choices, computed.choices)
    assert not store.has(ROWS[2])
    with pytest.raises(CaptureError, match="missing or damaged"):
        store.read(ROWS[2])


def test_model_of_other_weights_has_no_logits_of_this_one_and_a_copy_shares_them(
    goldens: list[GoldenLogits], tmp_path: Path
) -> None:
    """The fingerprint alone would not tell: it digests norms, router gate and bias."""
    store = open_store(tmp_path / "kept")
    store.write(goldens[0])
    record = json.loads((store.directory / MODEL_FILE).read_text(encoding="utf-8"))
    assert record["fingerprint"]["spec_digest"] == ModelSpec.from_folder(LEARNED).digest()
    other = tmp_path / "other"
    shutil.copytree(LEARNED, other)
    assert open_store(tmp_path / "kept", other).has(ROWS[0])
    shard = sorted(other.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = next(name for name in sorted(tensors) if name.endswith("w2.weight"))
    tensors[name][3, 5] *= 2
    save_file(tensors, shard, metadata={"format": "pt"})
    assert open_store(tmp_path / "kept").has(ROWS[0])
    assert not open_store(tmp_path / "kept", other).has(ROWS[0])


def test_damaged_file_counts_as_missing(
    goldens: list[GoldenLogits], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    store.write(goldens[0])
    (path,) = store.directory.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 0xFF
    path.write_bytes(content)
    assert not store.has(ROWS[0])
    assert "does not match its digest" in caplog.text
    path.write_bytes(content[:100])
    assert not store.has(ROWS[0])


def test_row_has_the_logits_of_its_own_tokens_alone(goldens: list[GoldenLogits]) -> None:
    """The second row begins with the first one: attention is causal."""
    short, longer = goldens[0], goldens[1]
    assert short.row == ROWS[0]
    torch.testing.assert_close(
        longer.exact.candidates[:6, :5], short.exact.candidates[:6, :5], rtol=1e-3, atol=1e-3
    )
    assert goldens[2].num_tokens == 2


def test_variants_differ_from_the_exact_model_by_noise(goldens: list[GoldenLogits]) -> None:
    noises = torch.stack([divergence(goldens[1].exact, variant) for variant in goldens[1].variants])
    assert bool((noises > 0).all())
    assert float(noises.median()) < 0.05


@pytest.fixture(scope="module")
def embedded() -> StreamStart:
    spec = ModelSpec.from_folder(LEARNED)
    with CheckpointReader(LEARNED) as reader:
        weight = ModelTensors.open(reader, spec, torch.bfloat16, with_layers=False)[EMBEDDING]
        return StreamStart(layer=0, states={row: weight[torch.tensor(row)] for row in STREAM_ROWS})


@pytest.fixture(scope="module")
def last_outputs() -> StreamStart:
    """The exact copy's output of the last layer."""
    spec = ModelSpec.from_folder(LEARNED)
    with CheckpointReader(LEARNED) as reader:
        model = RoundedModel(spec=spec, reader=reader, kinds=KINDS)
        batch = pad_rows(
            list(map(list, STREAM_ROWS)), padding_side="right", buckets=(), pad_token_id=0, source="rows"
        )
        (outputs,) = model.run([batch])
    return StreamStart(
        layer=NUM_LAYERS,
        states={row: states[: len(row)] for row, states in zip(STREAM_ROWS, outputs[0], strict=True)},
    )


def test_embedding_as_the_stream_gives_the_whole_models_logits(
    whole: list[GoldenLogits], embedded: StreamStart
) -> None:
    for found, expected in zip(compute(STREAM_ROWS, embedded), whole, strict=True):
        assert torch.equal(found.exact.candidates, expected.exact.candidates)
        for one, other in zip(found.variants, expected.variants, strict=True):
            assert torch.equal(one.candidates, other.candidates)


def test_behind_all_layers_only_the_heads_noise_is_left(
    whole: list[GoldenLogits], last_outputs: StreamStart
) -> None:
    for found, expected in zip(compute(STREAM_ROWS, last_outputs), whole, strict=True):
        torch.testing.assert_close(found.exact.candidates, expected.exact.candidates, rtol=1e-4, atol=1e-4)
        for one, other in zip(found.variants, expected.variants, strict=True):
            assert divergence(found.exact, one).mean() < 0.3 * divergence(expected.exact, other).mean()


def test_store_keeps_logits_of_each_stream_apart(
    whole: list[GoldenLogits], embedded: StreamStart, tmp_path: Path
) -> None:
    spec = ModelSpec.from_folder(LEARNED)
    with CheckpointReader(LEARNED) as reader:
        LogitsStore.open(tmp_path, reader=reader, spec=spec).write(whole[0])
        changed = {row: states + (row == STREAM_ROWS[1]) for row, states in embedded.states.items()}
        starts = (embedded, replace(embedded, layer=1), replace(embedded, states=changed))
        for start in (None, *starts):
            store = LogitsStore.open(tmp_path, reader=reader, spec=spec, start=start)
            assert store.has(STREAM_ROWS[0]) is (start is None)
    assert len({start.digest() for start in starts}) == len(starts)

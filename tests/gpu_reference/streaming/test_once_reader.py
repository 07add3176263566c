from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_reference.streaming.streaming import OnceReader
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader

GATE = "model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.fixture
def reader(toy: Path) -> OnceReader:
    return OnceReader(toy, index=TensorIndex.from_folder(toy))


def size(reader: OnceReader, *names: str) -> int:
    return sum(reader.index[name].size_bytes for name in names)


def test_announced_tensor_is_read_once_and_given_twice(reader: OnceReader, toy: Path) -> None:
    with CheckpointReader(toy) as plain:
        expected = plain.read_weight(EXPERT, torch.bfloat16)
    reader.expect_again([EXPERT, EXPERT + "_scale_inv", "no.such.tensor"])
    for _ in range(2):
        assert torch.equal(reader.read_weight(EXPERT, torch.bfloat16), expected)
    assert reader.num_bytes_read == size(reader, EXPERT, EXPERT + "_scale_inv")


def test_what_was_not_announced_is_read_again_and_counts_again(reader: OnceReader) -> None:
    reader.expect_again([GATE])
    for _ in range(3):
        reader.read(GATE)
    assert reader.num_bytes_read == 2 * size(reader, GATE)
    assert reader.sizes_read == {GATE: size(reader, GATE)}


def test_rows_of_an_announced_tensor_are_not_taken_for_the_whole(reader: OnceReader, toy: Path) -> None:
    with CheckpointReader(toy) as plain:
        expected = plain.read_weight(GATE, torch.float32)
    reader.expect_again([GATE])
    halves = [torch.empty(2, expected.shape[1]) for _ in range(2)]
    for half, start in zip(halves, (0, 2), strict=True):
        reader.read_weight_into(GATE, half, rows=range(start, start + 2))
    assert torch.equal(torch.cat(halves), expected[:4])
    assert torch.equal(reader.read_weight(GATE, torch.float32), expected)
    assert reader.sizes_read == {GATE: size(reader, GATE)}

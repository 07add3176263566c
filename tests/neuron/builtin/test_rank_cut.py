"""A rank's part of a layer's tensors, read alone: the right values, zeros where it has padding, and no other bytes.

Heads divided among ranks: all there, each with its own kv head, copies counted once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import O_PROJ, Q_NORM, Q_PROJ, expert_weight
from neuron.builtin.rank_cut import HeadLayout, RankCut


@pytest.fixture(scope="module")
def copies(toy: Path, toy_bf16: Path) -> dict[torch.dtype, Path]:
    """The toy model, larger than the others, in FP8 and BF16."""
    return {torch.float8_e4m3fn: toy, torch.bfloat16: toy_bf16}


@pytest.fixture(params=[torch.float8_e4m3fn, torch.bfloat16], ids=str)
def tensors(request: pytest.FixtureRequest, copies: dict[torch.dtype, Path]) -> LayerTensors:
    """Layer 1 of the toy: 8 heads of 64, hidden 256, experts of width 128."""
    folder = copies[request.param]
    return LayerTensors.open(CheckpointReader(folder), ModelSpec.from_folder(folder), 1, torch.bfloat16)


def read(cut: RankCut, tensors: LayerTensors, name: str) -> torch.Tensor:
    out = torch.full(cut.shape_of(tensors.given_shape(name)), 7.0, dtype=torch.bfloat16)
    cut.read(tensors, name, out)
    return out


@pytest.mark.parametrize("name", [Q_PROJ, Q_NORM])
def test_rows_of_heads_with_padding_between(tensors: LayerTensors, name: str) -> None:
    found = read(RankCut.of_heads((5, None, 2, 3), head_dim=64, dim=0), tensors, name)
    heads = tensors[name].unflatten(0, (8, 64))
    assert torch.equal(found, torch.cat((heads[5], torch.zeros_like(heads[0]), heads[2], heads[3])))


def test_columns_of_heads(tensors: LayerTensors) -> None:
    found = read(RankCut.of_heads((None, 7, 0), head_dim=64, dim=1), tensors, O_PROJ)
    heads = tensors[O_PROJ].unflatten(1, (8, 64))
    assert torch.equal(found, torch.cat((torch.zeros_like(heads[:, 0]), heads[:, 7], heads[:, 0]), dim=1))


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 128])
@pytest.mark.parametrize(("matrix", "dim"), [("w1", 0), ("w2", 1)])
def test_parts_make_up_the_tensor_and_are_padded_with_zeros(
    tensors: LayerTensors, matrix: str, dim: int, num_parts: int
) -> None:
    name = expert_weight(3, matrix)
    cuts = [RankCut.of_part(128, part=part, num_parts=num_parts, dim=dim) for part in range(num_parts)]
    parts = torch.cat([read(cut, tensors, name) for cut in cuts], dim=dim)
    assert torch.equal(parts.narrow(dim, 0, 128), tensors[name])
    assert not parts.narrow(dim, 128, parts.shape[dim] - 128).any()


@pytest.mark.parametrize(
    ("cut", "name", "num_bytes"),
    [
        # Of 128 rows in parts of 3, the 44th begins behind the last.
        (RankCut.of_part(128, part=43, num_parts=60, dim=0), expert_weight(0, "w1"), 0),
        (RankCut.of_heads((4,), head_dim=64, dim=0), Q_PROJ, 64 * 256 * 2),
    ],
)
def test_a_part_of_the_rows_reads_that_part_of_the_bytes(
    copies: dict[torch.dtype, Path], cut: RankCut, name: str, num_bytes: int
) -> None:
    folder = copies[torch.bfloat16]
    with CheckpointReader(folder) as reader:
        tensors = LayerTensors.open(reader, ModelSpec.from_folder(folder), 0, torch.bfloat16)
        assert read(cut, tensors, name).any() == (num_bytes > 0)
        assert reader.num_bytes_read == num_bytes


def test_storage_of_another_shape_is_refused(tensors: LayerTensors) -> None:
    cut = RankCut.of_heads((4,), head_dim=64, dim=0)
    with pytest.raises(ValueError, match=r"out has \[63, 256\], expected \[64, 256\]"):
        cut.read(tensors, Q_PROJ, torch.empty(63, 256))


def test_a_tensor_that_was_set_is_cut_too(tensors: LayerTensors) -> None:
    tensors[Q_PROJ] = torch.arange(512.0)[:, None].expand(512, 256)
    found = read(RankCut.of_heads((1,), head_dim=64, dim=0), tensors, Q_PROJ)
    assert torch.equal(found[:, 0].float(), torch.arange(64.0, 128.0))


SHAPES = [(6, 1), (6, 2), (6, 3), (6, 6), (4, 2), (8, 8), (48, 8), (10, 5), (1, 1)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), SHAPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_query_head_is_on_one_rank_beside_its_kv_head(
    num_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    layout = HeadLayout(num_heads=num_heads, num_kv_heads=num_kv_heads, num_ranks=num_ranks)
    found = layout.all_query_heads()
    assert sorted(head for head in found if head is not None) == list(range(num_heads))
    counted = []
    for rank in range(num_ranks):
        queries, keys = layout.query_heads(rank), layout.kv_heads(rank)
        # Each rank holds as many, in groups of one size.
        assert len(queries) * num_ranks == len(found)
        assert len(queries) % len(keys) == 0
        for index, head in enumerate(queries):
            if head is not None:
                assert keys[index // (len(queries) // len(keys))] == head // (num_heads // num_kv_heads)
        counted += [key for key, counts in zip(keys, layout.is_first_copy(rank), strict=True) if counts]
    # Every kv head counts once, and padding never.
    assert None not in counted
    assert sorted(key for key in counted if key is not None) == list(range(num_kv_heads))


@pytest.mark.parametrize(
    ("kv_heads", "queries", "keys"),
    [
        (1, [(0, 1), (2, 3), (4, 5), (None, None)], [(0,), (0,), (0,), (0,)]),
        (2, [(0, 1), (2, None), (3, 4), (5, None)], [(0,), (0,), (1,), (1,)]),
        (3, [(0, 1), (2, 3), (4, 5), (None, None)], [(0, 0), (1, 1), (2, 2), (None, None)]),
        (6, [(0, 1), (2, 3), (4, 5), (None, None)], [(0, 1), (2, 3), (4, 5), (None, None)]),
    ],
)
def test_six_heads_on_four_ranks(
    kv_heads: int, queries: list[tuple[int | None, ...]], keys: list[tuple[int | None, ...]]
) -> None:
    layout = HeadLayout(num_heads=6, num_kv_heads=kv_heads, num_ranks=4)
    assert [layout.query_heads(rank) for rank in range(4)] == queries
    assert [layout.kv_heads(rank) for rank in range(4)] == keys


def test_groups_of_unequal_size_are_refused() -> None:
    with pytest.raises(ValueError, match="6 heads in 4 groups on 2 ranks: expected"):
        HeadLayout(num_heads=6, num_kv_heads=4, num_ranks=2)

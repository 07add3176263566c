"""A rank's part of a layer's tensors, read alone: the right values, zeros where it has padding, and no other bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import O_PROJ, Q_NORM, Q_PROJ, expert_weight
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.builtin.rank_cut import RankCut


@pytest.fixture(scope="module")
def copies(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    """The toy model, larger than the others, in FP8 and BF16."""
    folder = tmp_path_factory.mktemp("copies") / "toy"
    synthesize(folder, model=SyntheticModel(), dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
    return {torch.float8_e4m3fn: toy, torch.bfloat16: folder}


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


def test_a_part_that_is_padding_alone_reads_nothing(copies: dict[torch.dtype, Path]) -> None:
    folder = copies[torch.bfloat16]
    with CheckpointReader(folder) as reader:
        tensors = LayerTensors.open(reader, ModelSpec.from_folder(folder), 0, torch.bfloat16)
        # Of 128 rows in parts of 3, the 44th begins behind the last.
        cut = RankCut.of_part(128, part=43, num_parts=60, dim=0)
        assert not read(cut, tensors, expert_weight(0, "w1")).any()
        assert reader.num_bytes_read == 0


def test_a_part_of_the_rows_reads_that_part_of_the_bytes(copies: dict[torch.dtype, Path]) -> None:
    folder = copies[torch.bfloat16]
    with CheckpointReader(folder) as reader:
        tensors = LayerTensors.open(reader, ModelSpec.from_folder(folder), 0, torch.bfloat16)
        read(RankCut.of_heads((4,), head_dim=64, dim=0), tensors, Q_PROJ)
        assert reader.num_bytes_read == 64 * 256 * 2


def test_storage_of_another_shape_is_refused(tensors: LayerTensors) -> None:
    cut = RankCut.of_heads((4,), head_dim=64, dim=0)
    with pytest.raises(ValueError, match=r"out has \[63, 256\], expected \[64, 256\]"):
        cut.read(tensors, Q_PROJ, torch.empty(63, 256))


def test_a_tensor_that_was_set_is_cut_too(tensors: LayerTensors) -> None:
    tensors[Q_PROJ] = torch.arange(512.0)[:, None].expand(512, 256)
    found = read(RankCut.of_heads((1,), head_dim=64, dim=0), tensors, Q_PROJ)
    assert torch.equal(found[:, 0].float(), torch.arange(64.0, 128.0))

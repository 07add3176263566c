"""Blocks: parts of tensors in a dtype to compute in, each part of the tensor once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minimax_tools.metrics.error_sums import read_blocks, sum_on_cores


@pytest.mark.parametrize("shape", [(400_000,), (3, 200_001), (1000, 300), (0, 5)])
def test_blocks_are_the_tensor_from_its_beginning_to_its_end(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).bfloat16()
    blocks = [(window, block.copy()) for window, (block,) in read_blocks((values,), range(shape[0]))]
    assert [window.start for window, _ in blocks[1:]] == [window.stop for window, _ in blocks[:-1]]
    found = np.concatenate([np.zeros((0, *shape[1:]), np.float32), *(block for _, block in blocks)])
    assert np.array_equal(found, values.float().numpy())


def test_all_are_float64_if_one_is() -> None:
    pair = torch.randn(3, 4).bfloat16(), torch.randn(3, 4)
    ((_, blocks),) = read_blocks(pair, range(3))
    assert {block.dtype for block in blocks} == {np.dtype(np.float32)}
    ((_, blocks),) = read_blocks((pair[0], pair[1].double()), range(3))
    assert {block.dtype for block in blocks} == {np.dtype(np.float64)}


@pytest.mark.parametrize("num_items", [0, 1, 7, 1_000_003])
def test_each_item_is_summed_on_one_core(num_items: int) -> None:
    values = torch.ones(num_items)
    parts = sum_on_cores(lambda items: range(items.start, items.stop), values)
    assert [item for part in parts for item in part] == list(range(num_items))

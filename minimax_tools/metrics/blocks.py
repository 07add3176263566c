"""Blocks: tensors widened to a dtype to compute in, a part at a time, so that no copy exceeds one block.

Shapes: N items, the first dimension. They are elements of flat tensors [N], or rows [N,F].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from minimax_tools.machine.compiled import CorePool

# Elements of a block of one tensor: two blocks of float32 stay in the processor's cache. With smaller blocks, the calls
# take longer than the loops.
_BLOCK_ELEMENTS = 1 << 17
# With fewer blocks, threads cost more time than they save.
_FEWEST_FOR_THREADS = 3

Block = np.ndarray[Any, np.dtype[np.float32]]  # or float64, if a tensor holds that
R = TypeVar("R")


def sum_on_cores(sum_part: Callable[[range], R], tensor: torch.Tensor) -> list[R]:
    """Call a function with the numbers of some of a tensor's items on each core; return what it gives, in order."""
    num_items = tensor.shape[0]
    is_large = num_items >= _FEWEST_FOR_THREADS * _block_items(tensor)
    num_parts = torch.get_num_threads() if is_large else 1
    # Items of a part, rounded up.
    share = max(-(-num_items // num_parts), 1)
    parts = [range(start, min(start + share, num_items)) for start in range(0, max(num_items, 1), share)]
    if len(parts) == 1:
        return [sum_part(parts[0])]
    with CorePool("metrics") as pool:
        return list(pool.map(sum_part, parts))


def read_blocks(tensors: tuple[torch.Tensor, ...], items: range) -> Iterator[tuple[slice, tuple[Block, ...]]]:
    """Yield some items of tensors of one shape block by block, all in float32, or in float64 if a tensor holds that.

    A block is overwritten by the next one, or lies in the tensor itself: it must not be changed.
    """
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    num_items = min(_block_items(tensors[0]), max(len(items), 1))
    buffers = [
        None
        if tensor.dtype == dtype and tensor.is_contiguous()
        else torch.empty(num_items, *tensor.shape[1:], dtype=dtype)
        for tensor in tensors
    ]
    for start in range(items.start, items.stop, num_items):
        window = slice(start, min(start + num_items, items.stop))
        blocks = (
            tensor[window] if buffer is None else buffer[: window.stop - start].copy_(tensor[window])
            for tensor, buffer in zip(tensors, buffers, strict=True)
        )
        yield window, tuple(block.numpy() for block in blocks)


def _block_items(tensor: torch.Tensor) -> int:
    elements_per_item = tensor[:1].numel() if tensor.shape[0] else 1
    return max(_BLOCK_ELEMENTS // max(elements_per_item, 1), 1)

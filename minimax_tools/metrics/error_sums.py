"""ErrorSums: sums of a side's errors at a site, by token and by channel, in one pass over both sides, block by block.

An error is a value minus the exact one. Massive channels are kept apart by token, for they would hide the others.
Shapes: T judged tokens, F channels of a site; N items of blocks, the first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from minimax_tools.machine.compiled import CorePool, compiled

# Elements of a block of one tensor: two blocks of float32 stay in the processor's cache. With smaller blocks, the calls
# take longer than the loops.
_BLOCK_ELEMENTS = 1 << 17
# With fewer blocks, threads cost more time than they save.
_FEWEST_FOR_THREADS = 3

Values = np.ndarray[Any, np.dtype[np.float32]]  # or float64, if a tensor holds that
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


def read_blocks(
    tensors: tuple[torch.Tensor, ...], items: range
) -> Iterator[tuple[slice, tuple[Values, ...]]]:
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


# Channels whose sums stay in the processor's first cache.
_TILE = 512

Block = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Sums = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class ErrorSums(NamedTuple):
    """Sums of one side's errors and values, float64, in the order in which they are computed."""

    squares: torch.Tensor  # [T], squared errors over ordinary channels
    massive_squares: torch.Tensor  # [T], the same over massive channels
    value_squares: torch.Tensor  # [T], squared values over ordinary channels
    massive_value_squares: torch.Tensor  # [T], the same over massive channels
    products: torch.Tensor  # [T], error · exact value over ordinary channels
    exact_squares: torch.Tensor  # [T], squared exact values over ordinary channels
    channel_offsets: torch.Tensor  # [F], errors over all tokens
    channel_squares: torch.Tensor  # [F], squared errors over all tokens
    channel_products: torch.Tensor  # [F], error · exact value over all tokens
    channel_exact_squares: torch.Tensor  # [F], squared exact values over all tokens


def sum_errors(*sides: torch.Tensor, exact: torch.Tensor, massive: torch.Tensor) -> tuple[ErrorSums, ...]:
    """Sum the errors of each side's values [T,F], all sides in one pass; the channels `massive`, bool [F], are massive.

    Within a block of tokens, sums by channel are added up in the block's own dtype: float32 is enough for errors of few
    digits.
    """
    (num_tokens, num_channels), ordinary = exact.shape, (~massive).numpy()
    by_token = np.zeros((len(sides), 6, num_tokens))

    def sum_part(tokens: range) -> Sums:
        by_channel = np.zeros((len(sides), 4, num_channels))
        for window, (exact_block, *blocks) in read_blocks((exact, *sides), tokens):
            for side, block in enumerate(blocks):
                _sum_by_token(block, exact_block, ordinary, by_token[side, :, window])
                _sum_by_channel(block, exact_block, by_channel[side])
        return by_channel

    by_channel = np.sum(sum_on_cores(sum_part, exact), axis=0)
    return tuple(
        ErrorSums(*tokens, *channels)
        for tokens, channels in zip(torch.from_numpy(by_token), torch.from_numpy(by_channel), strict=True)
    )


def square_by_token(
    values: torch.Tensor, origin: torch.Tensor | None, *, massive: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the squares of values − origin, [T,F] both, by token: float64 [T] over ordinary and over massive channels.

    Without an origin, the values themselves are squared.
    """
    ordinary = (~massive).numpy()
    by_token = np.zeros((6, values.shape[0]))

    def sum_part(tokens: range) -> None:
        for window, (origin_block, block) in read_blocks(
            (values if origin is None else origin, values), tokens
        ):
            _sum_by_token(block, origin_block, ordinary, by_token[:, window])

    sum_on_cores(sum_part, values)
    first = 2 if origin is None else 0
    return torch.from_numpy(by_token[first]), torch.from_numpy(by_token[first + 1])


def square_by_channel(values: torch.Tensor) -> torch.Tensor:
    """Sum the squares of values [T,F] by channel, float64 [F]."""

    def sum_part(tokens: range) -> Sums:
        by_channel = np.zeros(values.shape[1])
        for _, (block,) in read_blocks((values,), tokens):
            _square_by_channel(block, by_channel)
        return by_channel

    return torch.from_numpy(np.sum(sum_on_cores(sum_part, values), axis=0))


@compiled(
    "(float32[:, ::1], float32[:, ::1], boolean[::1], float64[:, :])",
    "(float64[:, ::1], float64[:, ::1], boolean[::1], float64[:, :])",
    sums_in_any_order=True,
)
def _sum_by_token(values: Block, exact: Block, ordinary: Flags, sums: Sums) -> None:
    """Fill in the six sums of each token of a block, [6,n] in the order of `ErrorSums`."""
    for token in range(values.shape[0]):
        row, exact_row = values[token], exact[token]
        squares = massive_squares = value_squares = massive_value_squares = products = exact_squares = 0.0
        # No branches, so that the compiler vectorises the loop.
        for i in range(row.size):
            value, exact_value = np.float64(row[i]), np.float64(exact_row[i])
            error = value - exact_value
            squares += error * error if ordinary[i] else 0.0
            massive_squares += 0.0 if ordinary[i] else error * error
            value_squares += value * value if ordinary[i] else 0.0
            massive_value_squares += 0.0 if ordinary[i] else value * value
            products += error * exact_value if ordinary[i] else 0.0
            exact_squares += exact_value * exact_value if ordinary[i] else 0.0
        sums[0, token], sums[1, token] = squares, massive_squares
        sums[2, token], sums[3, token] = value_squares, massive_value_squares
        sums[4, token], sums[5, token] = products, exact_squares


@compiled(
    "(float32[:, ::1], float32[:, ::1], float64[:, ::1])",
    "(float64[:, ::1], float64[:, ::1], float64[:, ::1])",
)
def _sum_by_channel(values: Block, exact: Block, sums: Sums) -> None:
    """Add a block of tokens to the four sums of each channel, [4,F] in the order of `ErrorSums`."""
    offsets = np.empty(_TILE, values.dtype)
    squares, products, exact_squares = np.empty_like(offsets), np.empty_like(offsets), np.empty_like(offsets)
    for start in range(0, values.shape[1], _TILE):
        offsets[:] = squares[:] = products[:] = exact_squares[:] = 0
        for token in range(values.shape[0]):
            row, exact_row = values[token, start : start + _TILE], exact[token, start : start + _TILE]
            # Two loops of two sums: with four the compiler would not vectorise.
            for i in range(row.size):
                error = row[i] - exact_row[i]
                offsets[i] += error
                squares[i] += error * error
            for i in range(row.size):
                products[i] += (row[i] - exact_row[i]) * exact_row[i]
                exact_squares[i] += exact_row[i] * exact_row[i]
        tile = sums[:, start : start + _TILE]
        for i in range(tile.shape[1]):
            tile[0, i] += offsets[i]
            tile[1, i] += squares[i]
            tile[2, i] += products[i]
            tile[3, i] += exact_squares[i]


@compiled("(float32[:, ::1], float64[::1])", "(float64[:, ::1], float64[::1])")
def _square_by_channel(values: Block, sums: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    """Add the squares of a block of tokens to the sum of each channel, [F]."""
    squares = np.empty(_TILE, values.dtype)
    for start in range(0, values.shape[1], _TILE):
        squares[:] = 0
        for token in range(values.shape[0]):
            row = values[token, start : start + _TILE]
            for i in range(row.size):
                squares[i] += row[i] * row[i]
        tile = sums[start : start + _TILE]
        for i in range(tile.size):
            tile[i] += squares[i]

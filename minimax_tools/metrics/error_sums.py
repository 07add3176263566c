"""ErrorSums: sums of one side's errors at a site, by token and by channel, in one pass over its values.

An error is a value minus the exact one. Massive channels are kept apart by token, for they would hide the others.
Shapes: T judged tokens, F channels of a site.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from minimax_tools.machine.compiled import compiled
from minimax_tools.machine.core_pool import on_cores

# Elements of a block of one side: two blocks of float32 stay in the processor's cache.
_BLOCK_ELEMENTS = 1 << 17
# With fewer blocks, threads cost more time than they save.
_FEWEST_BLOCKS_FOR_THREADS = 4
# Channels whose sums stay in the processor's first cache.
_TILE = 512

Block = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Sums = np.ndarray[tuple[int, int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ErrorSums:
    """Sums of one side's errors, float64."""

    squares: torch.Tensor  # [T], squared errors over ordinary channels
    massive_squares: torch.Tensor  # [T], the same over massive channels
    products: torch.Tensor  # [T], error · exact value over ordinary channels
    exact_squares: torch.Tensor  # [T], squared exact values over ordinary channels
    channel_offsets: torch.Tensor  # [F], errors over all tokens
    channel_squares: torch.Tensor  # [F], squared errors over all tokens
    channel_products: torch.Tensor  # [F], error · exact value over all tokens
    channel_exact_squares: torch.Tensor  # [F], squared exact values over all tokens


def sum_errors(values: torch.Tensor, exact: torch.Tensor, *, massive: torch.Tensor) -> ErrorSums:
    """Sum the errors of values [T,F]; the channels `massive`, bool [F], are massive.

    Within a block of tokens, sums by channel are added up in the blocks' own dtype: float32 is enough for errors of few
    digits.
    """
    (num_tokens, num_channels), ordinary = values.shape, (~massive).numpy()
    by_token = np.zeros((4, num_tokens))

    def sum_part(tokens: range) -> Sums:
        by_channel = np.zeros((4, num_channels))
        for window, block, exact_block in _blocks(values, exact, tokens):
            _sum_by_token(block, exact_block, ordinary, by_token[:, window])
            _sum_by_channel(block, exact_block, by_channel)
        return by_channel

    parts = on_cores("metrics", sum_part, num_tokens, fewest=_fewest_tokens(num_channels))
    by_channel = np.sum(parts, axis=0)
    return ErrorSums(
        squares=torch.from_numpy(by_token[0]),
        massive_squares=torch.from_numpy(by_token[1]),
        products=torch.from_numpy(by_token[2]),
        exact_squares=torch.from_numpy(by_token[3]),
        channel_offsets=torch.from_numpy(by_channel[0]),
        channel_squares=torch.from_numpy(by_channel[1]),
        channel_products=torch.from_numpy(by_channel[2]),
        channel_exact_squares=torch.from_numpy(by_channel[3]),
    )


def square_errors(
    values: torch.Tensor, exact: torch.Tensor | None, *, massive: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the squared errors of values [T,F] by token, float64 [T] over ordinary and over massive channels.

    Without exact values, these are the squares of the values themselves.
    """
    (num_tokens, num_channels), ordinary = values.shape, (~massive).numpy()
    by_token = np.zeros((4, num_tokens))

    def sum_part(tokens: range) -> None:
        for window, block, exact_block in _blocks(values, exact, tokens):
            _sum_by_token(block, exact_block, ordinary, by_token[:, window])

    on_cores("metrics", sum_part, num_tokens, fewest=_fewest_tokens(num_channels))
    return torch.from_numpy(by_token[0]), torch.from_numpy(by_token[1])


def square_channels(values: torch.Tensor) -> torch.Tensor:
    """Sum the squares of values [T,F] by channel, float64 [F]."""
    num_tokens, num_channels = values.shape

    def sum_part(tokens: range) -> Sums:
        by_channel = np.zeros((4, num_channels))
        for _, block, zeros in _blocks(values, None, tokens):
            _sum_by_channel(block, zeros, by_channel)
        return by_channel

    parts = on_cores("metrics", sum_part, num_tokens, fewest=_fewest_tokens(num_channels))
    return torch.from_numpy(np.sum(parts, axis=0)[1])


def _fewest_tokens(num_channels: int) -> int:
    """Return the number of tokens below which threads cost more time than they save."""
    return _FEWEST_BLOCKS_FOR_THREADS * _block_tokens(num_channels)


def _block_tokens(num_channels: int) -> int:
    return max(_BLOCK_ELEMENTS // max(num_channels, 1), 1)


def _blocks(
    values: torch.Tensor, exact: torch.Tensor | None, tokens: range
) -> Iterator[tuple[slice, Block, Block]]:
    """Yield some tokens of values and exact values (zeros without) block by block, both float32 or both float64."""
    num_tokens, num_channels = _block_tokens(values.shape[1]), values.shape[1]
    dtypes = {values.dtype} if exact is None else {values.dtype, exact.dtype}
    buffers = torch.zeros(
        2,
        min(num_tokens, len(tokens)),
        num_channels,
        dtype=torch.float64 if torch.float64 in dtypes else torch.float32,
    )
    for start in range(tokens.start, tokens.stop, num_tokens):
        window = slice(start, min(start + num_tokens, tokens.stop))
        block, exact_block = buffers[:, : window.stop - start]
        block.copy_(values[window])
        if exact is not None:
            exact_block.copy_(exact[window])
        yield window, block.numpy(), exact_block.numpy()


@compiled(
    "(float32[:, ::1], float32[:, ::1], boolean[::1], float64[:, :])",
    "(float64[:, ::1], float64[:, ::1], boolean[::1], float64[:, :])",
    sums_in_any_order=True,
)
def _sum_by_token(values: Block, exact: Block, ordinary: np.ndarray, sums: Sums) -> None:
    """Fill in the four sums of each token of a block, [4,n] in the order of `ErrorSums`."""
    for token in range(values.shape[0]):
        row, exact_row = values[token], exact[token]
        squares = massive_squares = products = exact_squares = 0.0
        # No branches, so that the compiler vectorises the loop.
        for i in range(row.size):
            exact_value = np.float64(exact_row[i])
            error = np.float64(row[i]) - exact_value
            square = error * error
            squares += square if ordinary[i] else 0.0
            massive_squares += 0.0 if ordinary[i] else square
            products += error * exact_value if ordinary[i] else 0.0
            exact_squares += exact_value * exact_value if ordinary[i] else 0.0
        sums[0, token], sums[1, token] = squares, massive_squares
        sums[2, token], sums[3, token] = products, exact_squares


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

"""Products of float32 states with a weight of fewer bits, without a float32 copy of the whole weight.

Few tokens multiply a BF16 weight in one compiled loop, which upcasts a row at a time. All else is upcast a block of
rows at a time, and multiplied by torch. The loop runs without Python's lock: dozens of small calls for each matrix
would keep the lock from the threads that read the next layer.
t tokens, R rows and C columns of a weight.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from minimax_tools.machine.compiled import compiled

# Values of a block, half a megabyte in float32: the block is still in a core's cache when the product reads it.
_BLOCK_VALUES = 2**17
# Number of tokens from which torch's product of blocks is faster than the compiled loop (measured, AVX-512), and
# weight × statesᵀ faster than states × weightᵀ.
_MANY_TOKENS = 16

Bits = np.ndarray[tuple[int, int], np.dtype[np.uint16]]
Values = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Row = np.ndarray[tuple[int], np.dtype[np.float32]]


class Scratch(threading.local):
    """A block of float32 values for each thread."""

    def __init__(self) -> None:
        self.values = torch.empty(_BLOCK_VALUES)


def multiply_upcast(
    weight: torch.Tensor, states: torch.Tensor, scratch: Scratch, *, first_column: int = 0
) -> torch.Tensor:
    """Multiply `states` [t,C] by the transposed `weight`, C columns from `first_column` on: both in float32, [t,R]."""
    num_tokens, num_columns = states.shape
    if states.device.type != "cpu":
        columns = weight[:, first_column : first_column + num_columns]
        return states @ columns.to(states.device, torch.float32).T
    if weight.dtype == torch.bfloat16 and weight.is_contiguous() and num_tokens < _MANY_TOKENS:
        product = torch.empty(num_tokens, len(weight))
        bits, row = weight.detach().view(torch.uint16).numpy(), np.empty(num_columns, dtype=np.float32)
        _multiply_rows(bits, first_column, states.contiguous().numpy(), row, product.numpy())
        return product
    return _multiply_blocks(weight[:, first_column : first_column + num_columns], states, scratch)


def _multiply_blocks(weight: torch.Tensor, states: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    num_rows, num_columns = weight.shape
    block_rows = _BLOCK_VALUES // num_columns
    blocks = scratch.values[: block_rows * num_columns].view(block_rows, num_columns)
    is_weight_left = len(states) >= _MANY_TOKENS
    states_ct = states.T.contiguous()
    product = states.new_empty((num_rows, len(states)) if is_weight_left else (len(states), num_rows))
    for start in range(0, num_rows, block_rows):
        rows = slice(start, min(start + block_rows, num_rows))
        block = blocks[: rows.stop - start].copy_(weight[rows])
        if is_weight_left:
            torch.mm(block, states_ct, out=product[rows])
        else:
            torch.mm(states, block.T, out=product[:, rows])
    return product.T if is_weight_left else product


@compiled("(uint16[:, ::1], int64, float32[:, ::1], float32[::1], float32[:, ::1])", sums_in_any_order=True)
def _multiply_rows(bits: Bits, first_column: int, states: Values, row: Row, product: Values) -> None:
    """Write the product [t,R] of states [t,C] and a weight's BF16 bits; `row` [C] is memory for a row in float32."""
    for number in range(bits.shape[0]):
        row_bits = bits[number, first_column : first_column + row.size]
        for column in range(row.size):
            # BF16 is the upper half of a float32. The casts keep numba from widening to 64 bits.
            row[column] = np.uint32(np.uint32(row_bits[column]) << np.uint32(16)).view(np.float32)
        for token in range(states.shape[0]):
            token_states = states[token]
            total = np.float32(0.0)
            for column in range(row.size):
                total += row[column] * token_states[column]
            product[token, number] = total

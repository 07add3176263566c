"""Experts computed in float32 from weights of fewer bits, without a float32 copy of a whole expert.

Few tokens multiply a BF16 weight in one compiled loop, which upcasts a row at a time. All else is upcast a block of
rows at a time, and multiplied by torch. The loop runs without Python's lock: dozens of small calls for each matrix
would keep the lock from the threads that read the next layer.
T tokens, t those of one expert, k experts per token, H hidden, R rows and C columns of a weight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from minimax_tools.machine.compiled import CorePool, compiled
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.weight_names import MlpNames
from minimax_tools.reference.float32_stages import activate
from minimax_tools.reference.rounding import Rounding, rounded_rows

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


# Numbers of the roundings of one expert, below `_DRAWS_PER_EXPERT`, so that no two roundings share random steps.
_GATE, _UP, _SILU, _ACTIVATED, _FIRST_HALF, _SECOND_HALF, _DOWN, _WEIGHTED, _SUM = range(9)
_SCALED, _SIGMOID, _PLUS_ONE = range(9, 12)
_DRAWS_PER_EXPERT = 16

# Rounds values [t,…] of an expert's tokens in place, and returns them; the number is that of one of its roundings.
Round: TypeAlias = "Callable[[torch.Tensor, int], torch.Tensor]"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertRounding:
    """The rounding of what each token's experts compute."""

    rounding: Rounding
    kinds: torch.Tensor  # int64 [T], the `RoundingKind` of each token, ascending

    def of_expert(self, expert: int, tokens: torch.Tensor) -> Round:
        """Return the function that rounds the values of an expert's tokens [t], ascending."""
        rounded, first_draw = rounded_rows(self.kinds[tokens.cpu()]), expert * _DRAWS_PER_EXPERT
        return lambda values, number: self.rounding.apply(values, rounded, draw=first_draw + number)


def upcast_experts(
    weights: Mapping[str, torch.Tensor],
    states: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    *,
    graph: ModelGraph,
    rounding: ExpertRounding | None = None,
) -> torch.Tensor:
    """Run every token of `states` [T,H] through its `experts` [T,k], weighted by `shares` [T,k], in float32: [T,H].

    On a CPU experts run side by side, one thread each. Their outputs are added in the order of the experts' numbers,
    so that the sums do not depend on the number of threads. `weights` are the layer's, by mm2's relative names; `graph`
    tells how gate and up are combined. Without `rounding`, all is computed exactly.
    """
    output = torch.zeros_like(states)
    numbers = experts.unique().tolist()
    # For each expert its tokens [t], and the column of `experts` [t] in which each token names it.
    routed = [torch.where(experts == number) for number in numbers]
    roundings = [
        None if rounding is None else rounding.of_expert(number, tokens)
        for number, (tokens, _) in zip(numbers, routed, strict=True)
    ]
    scratch = Scratch()

    def run(
        number: int, tokens: torch.Tensor, positions: torch.Tensor, rounded: Round | None
    ) -> torch.Tensor:
        # Threads begin with gradients on.
        with torch.no_grad():
            token_shares = shares[tokens, positions, None]
            names = MlpNames.of_expert(number)
            if rounded is None:
                return run_exact(weights, names, graph, states[tokens], scratch).mul_(token_shares)
            expert_output = run_rounded(weights, names, graph, states[tokens], scratch, rounded)
            return rounded(expert_output.mul_(token_shares), _WEIGHTED)

    tokens_of, positions_of = [tokens for tokens, _ in routed], [positions for _, positions in routed]
    with _side_by_side(states.device) as map_in_order:
        expert_outputs = map_in_order(run, numbers, tokens_of, positions_of, roundings)
        for tokens, rounded, expert_output in zip(tokens_of, roundings, expert_outputs, strict=True):
            if rounded is None:
                output.index_add_(0, tokens, expert_output)
            else:
                output[tokens] = rounded(expert_output.add_(output[tokens]), _SUM)
    return output


@contextmanager
def _side_by_side(device: torch.device) -> Iterator[Callable[..., Iterable[torch.Tensor]]]:
    """Yield a `map` that runs calls in as many threads as torch computes with, and keeps their order."""
    if device.type != "cpu":
        # A device queues the calls itself: threads would not help.
        yield map
        return
    with CorePool("upcast") as pool:
        yield pool.map


def run_exact(
    weights: Mapping[str, torch.Tensor],
    names: MlpNames,
    graph: ModelGraph,
    states: torch.Tensor,
    scratch: Scratch,
) -> torch.Tensor:
    """Run an MLP without rounding, [t,H] to [t,H]."""
    gate, up = (multiply_upcast(weights[name], states, scratch) for name in (names.gate, names.up))
    return multiply_upcast(weights[names.down], activate(graph, gate, up), scratch)


def run_rounded(
    weights: Mapping[str, torch.Tensor],
    names: MlpNames,
    graph: ModelGraph,
    states: torch.Tensor,
    scratch: Scratch,
    rounded: Round,
) -> torch.Tensor:
    """Run an MLP with roundings, [t,H] to [t,H]; the two halves of w2 are summed apart, as by two ranks."""

    def multiply(weight: torch.Tensor, part: torch.Tensor, first_column: int = 0) -> torch.Tensor:
        return multiply_upcast(weight, part, scratch, first_column=first_column).contiguous()

    gate = rounded(multiply(weights[names.gate], states), _GATE)
    up = rounded(multiply(weights[names.up], states), _UP)
    if graph.swiglu_alpha is None:
        activated = rounded(rounded(torch.nn.functional.silu(gate), _SILU).mul_(up), _ACTIVATED)
    else:
        gate, up = gate.clamp(max=graph.swiglu_limit), up.clamp(-graph.swiglu_limit, graph.swiglu_limit)
        slope = rounded(torch.sigmoid(rounded(graph.swiglu_alpha * gate, _SCALED)), _SIGMOID)
        activated = rounded(rounded(slope.mul_(gate), _SILU).mul_(rounded(up + 1.0, _PLUS_ONE)), _ACTIVATED)
    down, (first_part, second_part) = weights[names.down], activated.chunk(2, dim=-1)
    first = rounded(multiply(down, first_part), _FIRST_HALF)
    second = rounded(multiply(down, second_part, first_part.shape[-1]), _SECOND_HALF)
    return rounded(first.add_(second), _DOWN)

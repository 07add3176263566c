"""Experts in float32 from weights of fewer bits, upcast a block of rows at a time: no float32 expert ever lies whole.

T tokens, t those of one expert, k experts per token, H hidden, I intermediate, R rows and C columns of a weight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from minimax_tools.checkpoint.names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, expert_weight
from minimax_tools.core_pool import CorePool

# Half a megabyte in float32: it stays in a core's cache between the cast that writes it and the product that reads it.
_BLOCK_VALUES = 2**17
# For so many tokens or more, the product with the weight on the left is the faster one.
_MANY_TOKENS = 16


def upcast_experts(
    weights: Mapping[str, torch.Tensor],
    states: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    """Every token through its experts, in float32: [T,H].

    On a CPU experts run side by side, one thread each, and are added in the order of their numbers: the sums do
    not depend on how many threads there are.

    Args:
        weights: The layer's weights by the hub's relative names, of any float dtype; read from several threads.
        states: float32 [T,H].
        experts: int64 [T,k], each token's experts.
        shares: float32 [T,k], what each of them counts.
    """
    output = torch.zeros_like(states)
    numbers = experts.unique().tolist()
    routed = [torch.where(experts == number) for number in numbers]
    scratch = _Scratch()

    def run(number: int, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # Threads begin with gradients on.
        with torch.no_grad():
            expert_output = _run_expert(weights, number, states[tokens], scratch)
            return expert_output.mul_(shares[tokens, positions, None])

    with _side_by_side(states.device) as map_in_order:
        for (tokens, _), expert_output in zip(
            routed, map_in_order(run, numbers, *zip(*routed, strict=True)), strict=True
        ):
            output.index_add_(0, tokens, expert_output)
    return output


class _Scratch(threading.local):
    """A block of float32 values for each thread."""

    def __init__(self) -> None:
        self.values = torch.empty(_BLOCK_VALUES)


@contextmanager
def _side_by_side(device: torch.device) -> Iterator[Callable[..., Iterable[torch.Tensor]]]:
    """A `map` that runs calls in as many threads as torch computes with, and gives their results in order."""
    if device.type != "cpu":
        # A device runs what it is given by itself, one expert after the other.
        yield map
        return
    with CorePool("upcast") as pool:
        yield pool.map


def _run_expert(
    weights: Mapping[str, torch.Tensor], number: int, states: torch.Tensor, scratch: _Scratch
) -> torch.Tensor:
    """[t,H] to [t,H]."""
    gate, up = (
        _product(weights[expert_weight(number, name)], states, scratch) for name in (EXPERT_GATE, EXPERT_UP)
    )
    activated = torch.nn.functional.silu(gate).mul_(up)
    return _product(weights[expert_weight(number, EXPERT_DOWN)], activated, scratch)


def _product(weight: torch.Tensor, states: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
    """`states` [t,C] times the transposed `weight` [R,C]: float32 [t,R]."""
    if states.device.type != "cpu":
        return states @ weight.to(states.device, torch.float32).T
    num_rows, num_columns = weight.shape
    block_rows = _BLOCK_VALUES // num_columns
    blocks = scratch.values[: block_rows * num_columns].view(block_rows, num_columns)
    is_many = len(states) >= _MANY_TOKENS
    columns = states.T.contiguous()
    product = states.new_empty((num_rows, len(states)) if is_many else (len(states), num_rows))
    for start in range(0, num_rows, block_rows):
        rows = slice(start, min(start + block_rows, num_rows))
        block = blocks[: rows.stop - start].copy_(weight[rows])
        if is_many:
            torch.mm(block, columns, out=product[rows])
        else:
            torch.mm(states, block.T, out=product[:, rows])
    return product.T if is_many else product

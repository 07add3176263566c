"""Experts in float32 from weights of fewer bits, upcast a block of rows at a time: no float32 expert ever lies whole.

T tokens, t those of one expert, k experts per token, H hidden, I intermediate, R rows and C columns of a weight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from minimax_tools.machine.core_pool import CorePool
from minimax_tools.model.weight_names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, expert_weight
from minimax_tools.reference.rounding import Rounding

# Half a megabyte in float32: it stays in a core's cache between the cast that writes it and the product that reads it.
_BLOCK_VALUES = 2**17
# For so many tokens or more, the product with the weight on the left is the faster one.
_MANY_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertRounding:
    """Roundings of each token's experts.

    Args:
        rounding: Rounds rows.
        kinds: int64 [T], the `RoundingKind` of each token, ascending.
    """

    rounding: Rounding
    kinds: torch.Tensor

    def apply(self, values: torch.Tensor, tokens: torch.Tensor, *, draw: int) -> torch.Tensor:
        """Round values [t,…] of some tokens [t], ascending, in place."""
        return self.rounding.apply(values, self.kinds[tokens.cpu()], draw=draw)


def upcast_experts(
    weights: Mapping[str, torch.Tensor],
    states: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    *,
    rounding: ExpertRounding | None = None,
) -> torch.Tensor:
    """Run every token through its experts, in float32: [T,H].

    On a CPU experts run side by side, one thread each. They are added in the order of their numbers, so that the sums
    do not depend on the number of threads.

    Args:
        weights: The layer's weights by the hub's relative names, of any float dtype; read from several threads.
        states: float32 [T,H].
        experts: int64 [T,k], each token's experts.
        shares: float32 [T,k], what each of them counts.
        rounding: How tokens round what their experts compute, their sums too; None where all are exact.
    """
    output = torch.zeros_like(states)
    numbers = experts.unique().tolist()
    routed = [torch.where(experts == number) for number in numbers]
    scratch = _Scratch()

    def run(number: int, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # Threads begin with gradients on.
        with torch.no_grad():
            of_tokens = states[tokens]
            expert_output = (
                _run_expert(weights, number, of_tokens, scratch)
                if rounding is None
                else _run_rounded(weights, number, of_tokens, tokens, scratch, rounding)
            )
            share = shares[tokens, positions, None]
            expert_output.mul_(share)
            return (
                expert_output
                if rounding is None
                else rounding.apply(expert_output, tokens, draw=_draw(number, 7))
            )

    with _side_by_side(states.device) as map_in_order:
        for number, (tokens, _), expert_output in zip(
            numbers, routed, map_in_order(run, numbers, *zip(*routed, strict=True)), strict=True
        ):
            if rounding is None:
                output.index_add_(0, tokens, expert_output)
            else:
                total = expert_output.add_(output[tokens])
                output[tokens] = rounding.apply(total, tokens, draw=_draw(number, 8))
    return output


class _Scratch(threading.local):
    """A block of float32 values for each thread."""

    def __init__(self) -> None:
        self.values = torch.empty(_BLOCK_VALUES)


@contextmanager
def _side_by_side(device: torch.device) -> Iterator[Callable[..., Iterable[torch.Tensor]]]:
    """Yield a `map` that runs calls in as many threads as torch computes with, and keeps their order."""
    if device.type != "cpu":
        # A device runs what it is given by itself, one expert after the other.
        yield map
        return
    with CorePool("upcast") as pool:
        yield pool.map


def _run_expert(
    weights: Mapping[str, torch.Tensor], number: int, states: torch.Tensor, scratch: _Scratch
) -> torch.Tensor:
    """Run one expert exactly, [t,H] to [t,H]."""
    gate, up = (
        _product(weights[expert_weight(number, name)], states, scratch) for name in (EXPERT_GATE, EXPERT_UP)
    )
    activated = torch.nn.functional.silu(gate).mul_(up)
    return _product(weights[expert_weight(number, EXPERT_DOWN)], activated, scratch)


# How many roundings an expert may take: each has a number of its own.
_DRAWS_PER_EXPERT = 16


def _draw(number: int, step: int) -> int:
    return number * _DRAWS_PER_EXPERT + step


def _run_rounded(
    weights: Mapping[str, torch.Tensor],
    number: int,
    states: torch.Tensor,
    tokens: torch.Tensor,
    scratch: _Scratch,
    rounding: ExpertRounding,
) -> torch.Tensor:
    """[t,H] to [t,H]; the halves of the inner width are added up apart, as two ranks do."""

    def rounded(values: torch.Tensor, step: int) -> torch.Tensor:
        return rounding.apply(values.contiguous(), tokens, draw=_draw(number, step))

    gate, up = (
        rounded(_product(weights[expert_weight(number, name)], states, scratch), step)
        for step, name in enumerate((EXPERT_GATE, EXPERT_UP))
    )
    activated = rounded(rounded(torch.nn.functional.silu(gate), 2).mul_(up), 3)
    down = weights[expert_weight(number, EXPERT_DOWN)]
    halves = zip(activated.chunk(2, dim=-1), down.chunk(2, dim=-1), strict=True)
    first, second = (
        rounded(_product(columns, part, scratch), 4 + half) for half, (part, columns) in enumerate(halves)
    )
    return rounded(first.add_(second), 6)


def _product(weight: torch.Tensor, states: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
    """Multiply `states` [t,C] by the transposed `weight` [R,C]: float32 [t,R]."""
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

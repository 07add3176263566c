"""Experts computed in float32 from weights of fewer bits, without a float32 copy of a whole expert.

T tokens, t those of one expert, k experts per token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from minimax_tools.machine.core_pool import CorePool
from minimax_tools.model.weight_names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, expert_weight
from minimax_tools.reference.rounding import Rounding, rounded_rows
from minimax_tools.reference.upcast_product import Scratch, multiply_upcast

# Numbers of the roundings of one expert, below `_DRAWS_PER_EXPERT`, so that no two roundings share random steps.
_GATE, _UP, _SILU, _ACTIVATED, _FIRST_HALF, _SECOND_HALF, _DOWN, _WEIGHTED, _SUM = range(9)
_DRAWS_PER_EXPERT = 16

# Rounds values [t,…] of an expert's tokens in place, and returns them; the number is that of one of its roundings.
_Round: TypeAlias = "Callable[[torch.Tensor, int], torch.Tensor]"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertRounding:
    """The rounding of what each token's experts compute."""

    rounding: Rounding
    kinds: torch.Tensor  # int64 [T], the `RoundingKind` of each token, ascending

    def of_expert(self, expert: int, tokens: torch.Tensor) -> _Round:
        """Return the function that rounds the values of an expert's tokens [t], ascending."""
        rounded, first_draw = rounded_rows(self.kinds[tokens.cpu()]), expert * _DRAWS_PER_EXPERT
        return lambda values, number: self.rounding.apply(values, rounded, draw=first_draw + number)


def upcast_experts(
    weights: Mapping[str, torch.Tensor],
    states: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    *,
    rounding: ExpertRounding | None = None,
) -> torch.Tensor:
    """Run every token through its experts, in float32: [T,H].

    On a CPU experts run side by side, one thread each. Their outputs are added in the order of the experts' numbers,
    so that the sums do not depend on the number of threads.

    Args:
        weights: The layer's weights by the hub's relative names, of any float dtype; read from several threads.
        states: float32 [T,H].
        experts: int64 [T,k], each token's experts.
        shares: float32 [T,k], the weight of each of these experts.
        rounding: How tokens round what their experts compute, and its sums; None to compute exactly.
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
        number: int, tokens: torch.Tensor, positions: torch.Tensor, rounded: _Round | None
    ) -> torch.Tensor:
        # Threads begin with gradients on.
        with torch.no_grad():
            token_shares = shares[tokens, positions, None]
            if rounded is None:
                return _run_exact(weights, number, states[tokens], scratch).mul_(token_shares)
            expert_output = _run_rounded(weights, number, states[tokens], scratch, rounded)
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


def _run_exact(
    weights: Mapping[str, torch.Tensor], number: int, states: torch.Tensor, scratch: Scratch
) -> torch.Tensor:
    """Run one expert without rounding, [t,H] to [t,H]."""
    gate, up = (
        multiply_upcast(weights[expert_weight(number, name)], states, scratch)
        for name in (EXPERT_GATE, EXPERT_UP)
    )
    activated = torch.nn.functional.silu(gate).mul_(up)
    return multiply_upcast(weights[expert_weight(number, EXPERT_DOWN)], activated, scratch)


def _run_rounded(
    weights: Mapping[str, torch.Tensor],
    number: int,
    states: torch.Tensor,
    scratch: Scratch,
    rounded: _Round,
) -> torch.Tensor:
    """Run one expert with roundings, [t,H] to [t,H]; the two halves of w2 are summed apart, as by two ranks."""

    def multiply(weight: torch.Tensor, part: torch.Tensor, first_column: int = 0) -> torch.Tensor:
        return multiply_upcast(weight, part, scratch, first_column=first_column).contiguous()

    gate = rounded(multiply(weights[expert_weight(number, EXPERT_GATE)], states), _GATE)
    up = rounded(multiply(weights[expert_weight(number, EXPERT_UP)], states), _UP)
    activated = rounded(rounded(torch.nn.functional.silu(gate), _SILU).mul_(up), _ACTIVATED)
    down, (first_part, second_part) = weights[expert_weight(number, EXPERT_DOWN)], activated.chunk(2, dim=-1)
    first = rounded(multiply(down, first_part), _FIRST_HALF)
    second = rounded(multiply(down, second_part, first_part.shape[-1]), _SECOND_HALF)
    return rounded(first.add_(second), _DOWN)

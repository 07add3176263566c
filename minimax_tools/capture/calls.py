"""Calls: a site whose module runs several times in one forward, joined if the calls make up the batch.

| a call holds | for example |
|---|---|
| whole rows: [b,S,F], [b,N,S,D] | attention row by row |
| columns of every row: [B,s,F], [B,N,s,D] | a long prompt in chunks |
| tokens: [t,F], [1,t,F], [t,N,D], [1,N,t,D] | experts over chunks of all tokens, or of such columns |

Calls lie in the order of the batch. A site that is computed again, with the same bits, counts once. Where tokens may be
consecutive or columns of every row, the inputs of the calls tell: they are rows of a tensor that was recorded whole.
B batch, S sequence, F channels, N heads, D head_dim; b, s and t are parts of B, S and B·S.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from minimax_tools.model.site_layouts import are_equal_bits
from minimax_tools.model.sites import Site

# Channels of a call's input that are kept, to find its rows in other tensors.
NUM_TRACED = 8


class Calls(NamedTuple):
    """The calls of one site in one forward, in their order."""

    tensors: tuple[torch.Tensor, ...]  # what the site showed in each
    # The first channels of what the module was given in each call behind the first, [...,NUM_TRACED]
    inputs: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """The calls that make up a site, and how."""

    numbers: tuple[int, ...]  # the calls that count, in their order
    dim: int = 0  # the dim along which they are concatenated
    # Whether each holds columns of all rows, flat: [B·s,…].
    is_of_columns: bool = False

    def join(self, tensors: Sequence[torch.Tensor], batch_size: int) -> torch.Tensor:
        """Join the tensors of all calls to [B,…], or to [B·S,…]."""
        counted = [tensors[number] for number in self.numbers]
        if len(counted) == 1:
            return counted[0]
        if self.is_of_columns:
            parts = [_flat(tensor, self.dim).unflatten(0, (batch_size, -1)) for tensor in counted]
            return torch.cat(parts, dim=1)
        joined = torch.cat(counted, dim=self.dim)
        is_one_row = self.dim > 0 and batch_size > 1 and joined.shape[0] == 1
        return _flat(joined, self.dim) if is_one_row else joined


def plan_calls(sites: Mapping[Site, Calls], batch_shape: tuple[int, int]) -> dict[Site, CallPlan]:
    """Plan how the calls of each site make up the batch [B,S]; no plan if they do not, or in an unknown order."""
    whole = [
        calls.tensors[0]
        for site, calls in sites.items()
        if len(calls.tensors) == 1 and not site.has_heads_dim
    ]
    plans = {
        site: next(_plans(site, calls.tensors, batch_shape, inputs=calls.inputs, whole=whole), None)
        for site, calls in sites.items()
    }
    return {site: plan for site, plan in plans.items() if plan is not None}


def join_calls(sites: Mapping[Site, Calls], batch_shape: tuple[int, int]) -> dict[Site, torch.Tensor]:
    """Join the calls of each site of a batch [B,S]; a site whose calls do not make it up is left out."""
    return {
        site: plan.join(sites[site].tensors, batch_shape[0])
        for site, plan in plan_calls(sites, batch_shape).items()
    }


def _plans(
    site: Site,
    tensors: Sequence[torch.Tensor],
    batch_shape: tuple[int, int],
    *,
    inputs: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
) -> Iterator[CallPlan]:
    for numbers in _without_repeats(tensors):
        if len(numbers) == 1:
            if len(tensors) == 1 or _is_whole(tensors[0], batch_shape):
                yield CallPlan(numbers=numbers)
            return
        counted = [tensors[number] for number in numbers]
        plans = [
            CallPlan(numbers=numbers, dim=dim, is_of_columns=is_of_columns)
            for dim, is_of_columns in _ways(site, counted, batch_shape)
        ]
        if len(plans) > 1:
            plans = [plan for plan in plans if _fits(plan, tensors, inputs, whole, batch_shape)]
        if len(plans) == 1:
            yield plans[0]


def _without_repeats(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """Yield all calls; those that differ from the one before; then the first of several equal rounds of these."""
    yield tuple(range(len(tensors)))
    unlike = [0]
    unlike += [
        later
        for earlier, later in pairwise(range(len(tensors)))
        if not are_equal_bits(tensors[earlier], tensors[later])
    ]
    yield tuple(unlike)
    for length in range(2, len(unlike) // 2 + 1):
        rounds = zip(unlike, unlike[length:], strict=False)
        if len(unlike) % length == 0 and all(
            are_equal_bits(tensors[number], tensors[again]) for number, again in rounds
        ):
            yield tuple(unlike[:length])


def _is_whole(tensor: torch.Tensor, batch_shape: tuple[int, int]) -> bool:
    """Decide whether a call may hold all tokens, of one head or of several."""
    return (tensor.numel() // tensor.shape[-1]) % (batch_shape[0] * batch_shape[1]) == 0


def _ways(
    site: Site, tensors: Sequence[torch.Tensor], batch_shape: tuple[int, int]
) -> Iterator[tuple[int, bool]]:
    """Yield the ways in which calls add up to the batch: the dim to join, and whether they hold columns, flat."""
    batch_size, length = batch_shape
    num_dims, dtypes = {tensor.ndim for tensor in tensors}, {tensor.dtype for tensor in tensors}
    flat_dims = 3 if site.has_heads_dim else 2
    if len(dtypes) > 1 or num_dims not in ({flat_dims}, {flat_dims + 1}):
        return
    if num_dims == {flat_dims}:
        yield from _ways_of_tokens(tensors, 0, batch_shape)
        return
    # Heads may lie before the tokens or behind them.
    for dim in (2, 1) if site.has_heads_dim else (1,):
        if all(tensor.shape[dim] == length for tensor in tensors):
            if _adds_up(tensors, 0, batch_size):
                yield 0, False
        elif all(tensor.shape[0] == batch_size for tensor in tensors):
            if _adds_up(tensors, dim, length):
                yield dim, False
        elif all(tensor.shape[0] == 1 for tensor in tensors):
            yield from _ways_of_tokens(tensors, dim, batch_shape)


def _ways_of_tokens(
    tensors: Sequence[torch.Tensor], dim: int, batch_shape: tuple[int, int]
) -> Iterator[tuple[int, bool]]:
    batch_size, length = batch_shape
    if not _adds_up(tensors, dim, batch_size * length):
        return
    yield dim, False
    if batch_size > 1 and all(tensor.shape[dim] % batch_size == 0 for tensor in tensors):
        yield dim, True


def _adds_up(tensors: Sequence[torch.Tensor], dim: int, num_rows: int) -> bool:
    """Decide whether tensors have so many rows along `dim` together, and else one shape."""
    others = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
    return len(others) == 1 and sum(tensor.shape[dim] for tensor in tensors) == num_rows


def _fits(
    plan: CallPlan,
    tensors: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    whole: Iterable[torch.Tensor],
    batch_shape: tuple[int, int],
) -> bool:
    """Decide whether the inputs of the calls behind the first, joined by the plan, are the rows of a whole tensor."""
    if len(inputs) != len(tensors) - 1:
        return False
    later = [inputs[number - 1].flatten(0, -2).float() for number in plan.numbers[1:]]
    num_rows = [tensors[number].shape[plan.dim] for number in plan.numbers]
    if [len(given) for given in later] != num_rows[1:]:
        return False
    first = later[0].new_full((num_rows[0], later[0].shape[-1]), torch.nan)
    by_tokens = CallPlan(numbers=tuple(range(len(later) + 1)), is_of_columns=plan.is_of_columns)
    rows = by_tokens.join([first, *later], batch_shape[0]).flatten(0, -2)
    return any(_begins_with(tensor, rows) for tensor in whole)


def _begins_with(tensor: torch.Tensor, rows: torch.Tensor) -> bool:
    """Decide whether the first channels of a tensor's rows are `rows` [T,NUM_TRACED], as far as these are known."""
    if not tensor.is_floating_point() or tensor.ndim < 2 or tensor.numel() != len(rows) * tensor.shape[-1]:
        return False
    flat = tensor.flatten(0, -2)[:, : rows.shape[1]].float()
    return flat.shape == rows.shape and bool(((flat == rows) | rows.isnan()).all())


def _flat(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return [1,t,F] and [1,N,t,D], whose tokens lie along `dim`, with the tokens in front; dim 0 is there already."""
    return tensor if dim == 0 else tensor[0].movedim(dim - 1, 0)

"""Exchanged tokens: the ways in which a pass may take tokens for others.

B prompts, S columns, w columns of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from minimax_tools.capture.passes import ModelPasses


def exchanged_tokens(passes: ModelPasses, attention_mask: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ways to mistake tokens for others of the same pass: in words, and the place of each token's values.

    Places are int64 [B,S], indices into the flat batch; -1 for padding. `attention_mask` is [B,S] of 0/1.
    """
    num_rows = attention_mask.shape[0]
    grids = _grids(passes, attention_mask)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        f"rows rolled by {by}": partial(torch.roll, shifts=by, dims=0) for by in range(1, num_rows)
    }
    ways["[S,B] read as [B,S]"] = lambda grid: grid.T.reshape(grid.shape)
    ways["[B,S] read as [S,B]"] = lambda grid: grid.reshape(grid.shape[1], grid.shape[0]).T
    for words, exchange in ways.items() if num_rows > 1 else ():
        places = torch.full((attention_mask.numel(),), -1)
        for grid in grids:
            is_real = grid >= 0
            places[grid[is_real]] = exchange(grid)[is_real]
        yield words, places.view(attention_mask.shape)


def _grids(passes: ModelPasses, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return the tokens of each pass as it lays them out, int64 [B,w]: indices into the flat batch; -1 for padding."""
    numbers = passes.number_tokens(mask).masked_fill(mask == 0, -1)
    num_columns, num_later = mask.shape[1], passes.num_passes - 1
    grids = []
    for number in range(passes.num_passes):
        rows = [(one == number).nonzero().flatten() for one in numbers]
        is_prefill = number == 0 and not passes.chunks
        width = num_columns - num_later if is_prefill else max(map(len, rows))
        grid = torch.full((len(rows), width), -1)
        for row, columns in enumerate(rows):
            start = 0 if mask[row, 0] else width - len(columns)
            grid[row, start : start + len(columns)] = row * num_columns + columns
        grids.append(grid)
    return grids

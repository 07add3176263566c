"""RankRows: whose tokens the rows of a rank's tensor are, told by their number.

| rows of a rank's tensor | tokens |
|---|---|
| P | all of the pass |
| P / ranks | consecutive ones; the ranks' follow each other (sequence parallelism) |
| P · replicas | those of all data-parallel replicas, one replica after another |

P tokens of a pass, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.dumps.schedule import PassRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """Rows of a rank's tensor in one pass."""

    are_divided: bool = False  # whether each rank has an equal part of the tokens, in rank order
    # First row of the pass's own tokens, and the row behind them, in a tensor with the tokens of all replicas.
    own: tuple[int, int] | None = None

    @classmethod
    def of(cls, shape: tuple[int, ...], record: PassRecord, *, num_ranks: int) -> RankRows:
        """Return the rows that a tensor of this shape has; all of the pass's where their number tells nothing else."""
        num_tokens = len(record.positions)
        num_rows = count_rows(shape)
        if num_ranks > 1 and num_rows * num_ranks == num_tokens:
            return cls(are_divided=True)
        replica, num_replicas = record.replica
        if num_replicas > 1 and num_rows == num_tokens * num_replicas:
            return cls(own=(replica * num_tokens, (replica + 1) * num_tokens))
        return cls()

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the pass's own rows of a tensor whose ranks' pieces are put together."""
        if self.own is None:
            return tensor
        start, stop = self.own
        return tensor.narrow(rows_dim(tuple(tensor.shape)), start, stop - start)


def rows_dim(shape: tuple[int, ...]) -> int:
    """Return the dim of the rows: 0 in [T,F] and [T,N,D], 1 in [1,T,F]."""
    return 1 if len(shape) > 2 and shape[0] == 1 else 0


def count_rows(shape: tuple[int, ...]) -> int:
    """Return the number of rows of [T,F], [T,N,D], [1,T,F] or [T]."""
    return shape[rows_dim(shape)] if shape else 0

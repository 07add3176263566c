"""Sequences of indices in words: which rows of a tensor lie where, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

_NUM_SHOWN = 6


class Order(str, Enum):
    """How a sequence of indices goes."""

    FORWARD = "forward"
    REPEATED = "repeated"
    IN_BLOCKS = "in blocks"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A sequence of indices.

    Args:
        indices: 1-D int64, none of them below 0.
    """

    indices: torch.Tensor

    @property
    def order(self) -> Order:
        """Forward where each index follows the one before; repeated, or the same in every block, where that holds."""
        if self._follows(self.indices):
            return Order.FORWARD
        if self._period(step=0) is not None:
            return Order.REPEATED
        return Order.OTHER if self._block() is None else Order.IN_BLOCKS

    def __str__(self) -> str:
        indices = self.indices
        if len(indices) == 1:
            return str(int(indices[0]))
        if self._follows(indices):
            return f"{int(indices[0])}–{int(indices[-1])}"
        step = int(indices[1] - indices[0])
        if bool((indices[1:] - indices[:-1] == step).all()):
            return f"{int(indices[0])} {len(indices)} times" if step == 0 else self._listed(indices)
        period = self._period(step=0)
        if period is not None:
            return f"{Sequence(indices=indices[:period])}, repeated {len(indices) // period} times"
        block = self._block()
        if block is not None:
            return f"in each {block}: {self._listed(indices[:block] - indices[:block].min())}"
        pieces = self._pieces()
        if len(pieces) <= _NUM_SHOWN:
            return ", ".join(str(Sequence(indices=piece)) for piece in pieces)
        return self._listed(indices)

    @staticmethod
    def _follows(indices: torch.Tensor) -> bool:
        return bool((indices[1:] - indices[:-1] == 1).all())

    def _period(self, *, step: int) -> int | None:
        """After how many indices they come again, `step` higher each time."""
        count = len(self.indices)
        for period in range(1, count // 2 + 1):
            shift = step * period
            if count % period == 0 and bool((self.indices[period:] - self.indices[:-period] == shift).all()):
                return period
        return None

    def _block(self) -> int | None:
        """The size of the blocks that all go alike, each behind the one before; None where there are none."""
        return self._period(step=1)

    def _pieces(self) -> list[torch.Tensor]:
        """Runs in which each index follows the one before."""
        breaks = (self.indices[1:] - self.indices[:-1] != 1).nonzero().flatten() + 1
        return list(torch.tensor_split(self.indices, breaks))

    @staticmethod
    def _listed(indices: torch.Tensor) -> str:
        shown = [str(int(index)) for index in indices[:_NUM_SHOWN]]
        more = [] if len(indices) <= _NUM_SHOWN + 1 else ["…"]
        last = [str(int(indices[-1]))] if len(indices) > _NUM_SHOWN else []
        return ", ".join([*shown, *more, *last])

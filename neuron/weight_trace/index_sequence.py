"""Index sequence: the rows or columns of a source tensor in the order in which a port tensor holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Indices, or runs of indices, that a text lists before it cuts off.
_NUM_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSequence:
    """A sequence of indices, whose text depends on its pattern.

    | indices | text |
    |---|---|
    | 3 4 5 6 | `3–6` |
    | 3 3 3 | `3 3 times` |
    | 0 2 4 6 | `0, 2, 4, 6` |
    | 3 5 6 3 5 6 | `3, 5–6, repeated 2 times` |
    | 1 0 3 2 | `in each 2: 1, 0` |
    | 4 5 0 1 9 | `4–5, 0–1, 9` |
    """

    indices: torch.Tensor  # 1-D, int64, at least one index, none below 0

    @property
    def is_forward(self) -> bool:
        """True if each index is one more than the index before."""
        return bool((self.indices[1:] - self.indices[:-1] == 1).all())

    @property
    def is_repeated(self) -> bool:
        """True if the whole sequence repeats a shorter one."""
        return self._period(step=0) is not None

    def __str__(self) -> str:
        indices = self.indices
        if len(indices) == 1:
            return str(int(indices[0]))
        if self.is_forward:
            return f"{int(indices[0])}–{int(indices[-1])}"
        steps = indices[1:] - indices[:-1]
        if bool((steps == steps[0]).all()):
            return f"{int(indices[0])} {len(indices)} times" if int(steps[0]) == 0 else _word_list(indices)
        period = self._period(step=0)
        if period is not None:
            return f"{IndexSequence(indices=indices[:period])}, repeated {len(indices) // period} times"
        block = self._period(step=1)
        if block is not None:
            return f"in each {block}: {_word_list(indices[:block] - indices[:block].min())}"
        runs = torch.tensor_split(indices, (steps != 1).nonzero().flatten() + 1)
        if len(runs) <= _NUM_SHOWN:
            return ", ".join(str(IndexSequence(indices=run)) for run in runs)
        return _word_list(indices)

    def _period(self, *, step: int) -> int | None:
        """Return the shortest length after which the indices repeat, each `step` times that length higher."""
        count = len(self.indices)
        for period in range(1, count // 2 + 1):
            shift = step * period
            if count % period == 0 and bool((self.indices[period:] - self.indices[:-period] == shift).all()):
                return period
        return None


def _word_list(indices: torch.Tensor) -> str:
    """Return the first indices and the last as text."""
    shown = [str(int(index)) for index in indices[:_NUM_SHOWN]]
    if len(indices) > _NUM_SHOWN + 1:
        shown.append("…")
    if len(indices) > _NUM_SHOWN:
        shown.append(str(int(indices[-1])))
    return ", ".join(shown)

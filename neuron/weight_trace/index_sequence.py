"""Index sequence: the rows or columns of a source tensor in the order in which a port tensor holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Runs of indices, or indices besides the last one, that a text lists.
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

    `in each 2` speaks of blocks of two neighbours, wherever they lie: 11 10 13 12 has the same text. So ranks that
    reorder their own rows alike have one text.
    """

    indices: torch.Tensor  # 1-D, int64, at least one index, none below 0

    @property
    def is_ascending(self) -> bool:
        """True if each index is one more than the index before."""
        return bool((self.indices[1:] - self.indices[:-1] == 1).all())

    @property
    def is_repeated(self) -> bool:
        """True if the whole sequence repeats a shorter one."""
        return self._block_length(advances=False) is not None

    def __str__(self) -> str:
        indices = self.indices
        if len(indices) == 1:
            return str(int(indices[0]))
        if self.is_ascending:
            return f"{int(indices[0])}–{int(indices[-1])}"
        steps = indices[1:] - indices[:-1]
        if bool((steps == steps[0]).all()):
            return f"{int(indices[0])} {len(indices)} times" if int(steps[0]) == 0 else _word_list(indices)
        length = self._block_length(advances=False)
        if length is not None:
            return f"{IndexSequence(indices=indices[:length])}, repeated {len(indices) // length} times"
        length = self._block_length(advances=True)
        if length is not None:
            first = indices[:length] - indices[:length].min()
            # Only a block of neighbours: 0 5 2 7 advances by blocks of 2 too, but 0 and 5 are none.
            if torch.equal(first.sort().values, torch.arange(length)):
                return f"in each {length}: {_word_list(first)}"
        runs = torch.tensor_split(indices, (steps != 1).nonzero().flatten() + 1)
        if len(runs) <= _NUM_SHOWN:
            return ", ".join(str(IndexSequence(indices=run)) for run in runs)
        return _word_list(indices)

    def _block_length(self, *, advances: bool) -> int | None:
        """Return the length of the shortest equal blocks that make up the sequence; None if there are none.

        If it `advances`, a block is the block before with its length added to each index: 1 0 3 2 5 4 has blocks of 2.
        """
        count = len(self.indices)
        for length in range(1, count // 2 + 1):
            added = length if advances else 0
            if count % length == 0 and bool((self.indices[length:] - self.indices[:-length] == added).all()):
                return length
        return None


def _word_list(indices: torch.Tensor) -> str:
    """Return the indices as text; of more than `_NUM_SHOWN`, the first ones and the last."""
    shown = [str(int(index)) for index in indices[:_NUM_SHOWN]]
    if len(indices) > _NUM_SHOWN + 1:
        shown.append("…")
    if len(indices) > _NUM_SHOWN:
        shown.append(str(int(indices[-1])))
    return ", ".join(shown)

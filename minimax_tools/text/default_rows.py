"""The rows that a run is fed where nobody names any: one past a window, and short ones far from position 0.

What a golden does not hold, no port is judged on. Prompts alone begin at 0 and end early, so that a port that takes
positions modulo 128, or holds them in BF16 (exact to 256), passes them.
"""

from __future__ import annotations

from dataclasses import dataclass

# Longer than a window of 128 tokens, the smallest that models with sliding attention have. All rows are padded to it,
# and padding costs memory, disk and time as tokens do: no longer than it must be.
_LONG_LENGTH = 144
_FAR_LENGTH = 16
# A far row lies across such a position, so that tables that end there and positions that begin anew there break the
# distances within the row: attention, and so a port that shows its output alone, depends on these only. Every smaller
# power of two divides the second. float16 is exact up to 2048 and ends at 65504.
_CROSSED_POSITIONS = (4096, 65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultRow:
    """One row of random ids.

    Args:
        length: Number of tokens.
        start_position: Position of the first.
    """

    length: int
    start_position: int = 0


def default_rows(max_position_embeddings: int) -> tuple[DefaultRow, ...]:
    """Rows for a model of so many positions: a long one, and short ones far out, the last up to the last position.

    Those that do not fit a small model are left out or cut.
    """
    longest = min(_LONG_LENGTH, max_position_embeddings)
    last_start = max_position_embeddings - _FAR_LENGTH
    starts = {position - _FAR_LENGTH // 2 for position in _CROSSED_POSITIONS} | {last_start}
    return (
        DefaultRow(length=longest),
        *(
            DefaultRow(length=_FAR_LENGTH, start_position=start)
            for start in sorted(starts)
            if longest <= start <= last_start
        ),
    )

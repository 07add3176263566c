"""Byte ranges of a checkpoint's files; those of neighbouring tensors are joined into one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.checkpoint.header import TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes `start` to `stop` of a file, the latter excluded."""

    file: Path
    start: int
    stop: int


def join_ranges(entries: Iterable[TensorEntry]) -> list[ByteRange]:
    """Return the byte ranges of tensors in the order given; one that begins where the last ended joins its range."""
    ranges: list[ByteRange] = []
    for entry in entries:
        start, stop = entry.offset, entry.offset + entry.size_bytes
        if ranges and (ranges[-1].file, ranges[-1].stop) == (entry.file, start):
            start = ranges.pop().start
        ranges.append(ByteRange(file=entry.file, start=start, stop=stop))
    return ranges

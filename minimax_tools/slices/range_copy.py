"""Byte ranges, copied from file to file by the kernel.

`copy_file_range` copies bytes without loading them into this process. Where the system does not support it, for
example between two file systems, the bytes pass through one small buffer.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from itertools import groupby
from typing import BinaryIO

from minimax_tools.checkpoint.byte_ranges import ByteRange
from minimax_tools.errors import CheckpointError

# Bytes copied by one call: small enough to react to an interrupt, large enough to cost no time.
_PIECE_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20
# Errors of a system, or of a pair of file systems, that cannot copy in the kernel.
_UNSUPPORTED = frozenset({errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


def copy_ranges(ranges: Iterable[ByteRange], target: BinaryIO) -> None:
    """Append byte ranges to a file that is open for writing.

    Raises:
        CheckpointError: A source file cannot be opened, or has become shorter.
        OSError: The target cannot be written, or a source file cannot be read.
    """
    target.flush()
    for file, group in groupby(ranges, key=lambda byte_range: byte_range.file):
        try:
            source = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(
                f"{file} cannot be opened", found=str(error), next_step="Fetch the file again."
            ) from error
        try:
            for byte_range in group:
                _copy_range(byte_range, source, target.fileno())
        finally:
            os.close(source)


def _copy_range(byte_range: ByteRange, source: int, target: int) -> None:
    position = _copy_in_kernel(source, target, byte_range.start, byte_range.stop)
    position = _copy_through_buffer(source, target, position, byte_range.stop)
    if position < byte_range.stop:
        raise CheckpointError(
            f"{byte_range.file} became shorter",
            expected=f"bytes {byte_range.start} to {byte_range.stop}",
            found=f"an end at {position}",
            next_step="Fetch the file again.",
        )


def _copy_in_kernel(source: int, target: int, start: int, stop: int) -> int:
    """Copy with `copy_file_range` as far as it works, and return the position reached."""
    # Systems other than Linux lack the call.
    if not hasattr(os, "copy_file_range"):
        return start
    while start < stop:
        try:
            count = os.copy_file_range(source, target, min(stop - start, _PIECE_BYTES), start)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return start
        if count == 0:
            # The source has ended, or its file system cannot copy this way. The buffer will tell.
            return start
        start += count
    return start


def _copy_through_buffer(source: int, target: int, start: int, stop: int) -> int:
    """Copy up to `stop` or the source's end, and return the position reached."""
    if start == stop:
        return start
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    while start < stop:
        count = os.preadv(source, [buffer[: min(stop - start, _BUFFER_BYTES)]], start)
        if count == 0:
            return start
        written = 0
        while written < count:
            written += os.write(target, buffer[written:count])
        start += count
    return start

"""Byte ranges of one commit's files, from servers that allow range requests.

A hub has hashes of whole files only. Of a range, the length, the place and the size of the file are checked.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Iterator
from typing import Any

from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubCommit, HubFile
from minimax_tools.hub.faults import Attempts, BrokenTransferError, FetchStoppedError, translate
from minimax_tools.hub.transfer import open_body

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class NoRangesError(CheckpointError):
    """A server that sends whole files only."""


class HubRanges:
    """Byte ranges of files of one commit; safe to use from several threads.

    Args:
        commit: Commit to read from.
        stop: Event that ends all reads.
    """

    def __init__(self, commit: HubCommit, *, stop: threading.Event) -> None:
        self._commit = commit
        self._stop = stop

    def read(self, file: HubFile, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` of a file, `stop` not included.

        Raises:
            NoRangesError: The server sends whole files only.
            CheckpointError: They could not be fetched.
            FetchStoppedError: `stop` was set.
        """
        return b"".join(self.stream(file, start, stop))

    def stream(self, file: HubFile, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes piece by piece; a broken transfer goes on where it was.

        Raises:
            NoRangesError: The server sends whole files only.
            CheckpointError: They could not be fetched.
            FetchStoppedError: `stop` was set.
        """
        attempts = Attempts(self._commit.access, what=file.name, stop=self._stop)
        position = start
        while position < stop:
            pieces = self._stream_once(file, position, stop)
            try:
                while (piece := self._next(pieces, attempts, file)) is not None:
                    position += len(piece)
                    attempts.progress()
                    yield piece
            finally:
                pieces.close()

    def _next(self, pieces: Iterator[bytes], attempts: Attempts, file: HubFile) -> bytes | None:
        """Return the next piece; None at the end, or when another attempt is due."""
        try:
            return next(pieces, None)
        except Exception as error:
            try:
                attempts.fail(error)
            except FetchStoppedError:
                raise
            except Exception as last:
                raise translate(last, self._commit, file=file.name) from last
        return None

    def _stream_once(self, file: HubFile, start: int, stop: int) -> Generator[bytes, None, None]:
        """Yield the bytes of one response, no more than were asked for."""
        missing = stop - start
        with open_body(self._commit, file.name, byte_range=f"bytes={start}-{stop - 1}") as (answer, pieces):
            self._require_part(answer, file, start)
            for piece in pieces:
                if self._stop.is_set():
                    raise FetchStoppedError
                yield piece[:missing]
                missing -= min(len(piece), missing)
                if not missing:
                    return
        raise BrokenTransferError(f"the body ended {missing} bytes before byte {stop}")

    def _require_part(self, answer: Any, file: HubFile, start: int) -> None:
        if answer.status_code != 206:
            raise NoRangesError(
                f"{self._commit.access.endpoint} gives no part of {file.name}",
                expected="status 206",
                found=f"status {answer.status_code}, the whole file",
                next_step="Fetch whole files: leave out --byte-ranges.",
            )
        said = answer.headers.get("content-range", "")
        match = _CONTENT_RANGE.fullmatch(said)
        is_size = match is not None and match[2] in ("*", str(file.size_bytes))
        if match is None or int(match[1]) != start or not is_size:
            raise BrokenTransferError(
                f"bytes from {start} on of {file.size_bytes} were asked for, {said!r} came"
            )

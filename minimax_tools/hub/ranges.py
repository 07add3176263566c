"""HubRanges: parts of one commit's files, by range requests, where the server allows them.

A hub tells hashes of whole files only: of a part, length and place are checked, and that the file is still that long.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Iterator
from typing import Any

from minimax_tools.errors import CheckpointError
from minimax_tools.hub.attempts import Attempts, FetchStoppedError
from minimax_tools.hub.faults import BrokenTransferError, translate
from minimax_tools.hub.transfer import HubCommit, HubFile, open_body

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class NoRangesError(CheckpointError):
    """The server sends whole files only."""


class HubRanges:
    """Reads byte ranges of files of one commit; safe to use from several threads.

    Args:
        commit: What to read from.
        stop: Set to end all that is under way.
    """

    def __init__(self, commit: HubCommit, *, stop: threading.Event) -> None:
        self._commit = commit
        self._stop = stop

    def read(self, file: HubFile, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a file, the latter not included.

        Raises:
            NoRangesError: The server sends whole files only.
            CheckpointError: They could not be fetched.
            FetchStoppedError: `stop` was set.
        """
        return b"".join(self.stream(file, start, stop))

    def stream(self, file: HubFile, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes piece by piece; a transfer that breaks off goes on where it was.

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
        """Return the next piece; None where there is none, or another attempt is due."""
        try:
            return next(pieces, None)
        except Exception as error:
            self._fail(attempts, error, file)
        return None

    def _fail(self, attempts: Attempts, error: Exception, file: HubFile) -> None:
        """Wait until another attempt is due, or raise what the user should see."""
        try:
            attempts.fail(error)
        except FetchStoppedError:
            raise
        except Exception as last:
            commit = self._commit
            raise translate(
                last, model=commit.model, revision=commit.revision, access=commit.access, file=file.name
            ) from last

    def _stream_once(self, file: HubFile, start: int, stop: int) -> Generator[bytes, None, None]:
        """Yield one answer's bytes, no more than were asked for."""
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

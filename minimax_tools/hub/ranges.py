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

# First byte of the part, and size of the whole file, "*" if the server does not know it.
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class NoRangesError(CheckpointError):
    """A server that sends whole files only."""


class HubRanges:
    """Byte ranges of files of one commit; safe to use from several threads.

    Args:
        commit: Commit to read from.
        stop_event: Event that ends all reads.
    """

    def __init__(self, commit: HubCommit, *, stop_event: threading.Event) -> None:
        self._commit = commit
        self._stop_event = stop_event

    def read(self, file: HubFile, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` of a file, `stop` not included; errors are as for `stream`."""
        return b"".join(self.stream(file, start, stop))

    def stream(self, file: HubFile, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes `start` to `stop` of a file piece by piece; a broken transfer goes on where it was.

        Raises:
            NoRangesError: The server sends whole files only.
            CheckpointError: They could not be fetched.
            FetchStoppedError: The stop event was set.
        """
        attempts = Attempts(self._commit.access, name=file.name, stop=self._stop_event)
        position = start
        while position < stop:
            pieces = self._stream_once(file, position, stop)
            try:
                while (piece := self._next_piece(pieces, attempts, file)) is not None:
                    position += len(piece)
                    attempts.forget_failures()
                    yield piece
            finally:
                pieces.close()

    def _next_piece(self, pieces: Iterator[bytes], attempts: Attempts, file: HubFile) -> bytes | None:
        """Return the next piece of a response; None at its end, or after it broke off and another request is due.

        Only errors of the transfer are handled here, not those of the code that the pieces are yielded to.
        """
        try:
            return next(pieces, None)
        except Exception as error:
            try:
                # Returns when another attempt is due; raises `error` if none is left or none would help.
                attempts.wait_after(error)
            except FetchStoppedError:
                raise
            except Exception as last_error:
                # A NoRangesError stays as it is; other errors become a CheckpointError for the user.
                raise translate(last_error, self._commit, file=file.name) from last_error
        return None

    def _stream_once(self, file: HubFile, start: int, stop: int) -> Generator[bytes, None, None]:
        """Yield the bytes of one response, no more than were asked for."""
        num_missing = stop - start
        # The header's range includes its last byte.
        with open_body(self._commit, file.name, byte_range=f"bytes={start}-{stop - 1}") as (response, pieces):
            self._check_response(response, file, start)
            for piece in pieces:
                if self._stop_event.is_set():
                    raise FetchStoppedError
                yield piece[:num_missing]
                num_missing -= min(len(piece), num_missing)
                if not num_missing:
                    return
        raise BrokenTransferError(f"the body ended {num_missing} bytes before byte {stop}")

    def _check_response(self, response: Any, file: HubFile, start: int) -> None:
        """Check that the response is a part of this file, from byte `start` on."""
        if response.status_code != 206:
            raise NoRangesError(
                f"{self._commit.access.endpoint} gives no part of {file.name}",
                expected="status 206",
                found="status 200, the whole file"
                if response.status_code == 200
                else f"status {response.status_code}",
                next_step="Fetch whole files: leave out --byte-ranges.",
            )
        content_range = response.headers.get("content-range", "")
        match = _CONTENT_RANGE.fullmatch(content_range)
        listed_size = "*" if file.size_bytes is None else str(file.size_bytes)
        # A size of "*" is unknown: to the server, or to the hub that listed the file.
        if (
            match is None
            or int(match[1]) != start
            or (match[2] != listed_size and "*" not in (match[2], listed_size))
        ):
            raise BrokenTransferError(
                f"bytes from {start} on of {file.size_bytes} were asked for, {content_range!r} came"
            )

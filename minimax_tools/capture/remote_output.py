"""RemoteOutput: a run that is written on this machine, and put at a remote address once it is whole.

    <cache>/outputs/NAME-DIGEST/.output.json  the address
    <cache>/outputs/NAME-DIGEST/run/          the run, until it is put; then it becomes the address's mirror
    <cache>/outputs/NAME-DIGEST/.put          of a search, which stays to be resumed: what it holds was put

So a whole run in the folder is one that could not be put yet. The same command puts it, and computes nothing again.
Whether it may replace a capture at the address is judged by what is there when it is put.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.capture.address_records import OutputRecord, address_of
from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.mirror import adopt_mirror, mirror_capture
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import CaptureError, CheckpointError, RemoteError
from minimax_tools.hub.dataset_folder import open_remote
from minimax_tools.hub.faults import NoRepositoryError
from minimax_tools.remote.address import RemoteAddress
from minimax_tools.remote.cache import (
    OUTPUT_PUT,
    OUTPUT_RUN,
    OUTPUTS,
    CachedFolder,
    RemoteCache,
    locked_file,
    make_folder,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOutput:
    """The folder on this machine of a run that goes to a remote address."""

    address: RemoteAddress
    place: Path  # its folder in the cache

    @classmethod
    def at(cls, address: RemoteAddress, *, cache: RemoteCache | None = None) -> RemoteOutput:
        """Return the output that goes to an address; nothing is asked, and no folder is made."""
        cache = cache or RemoteCache.from_environment()
        return cls(address=address, place=cache.place(OUTPUTS, address, str(address)))

    @classmethod
    def find(cls, directory: Path) -> RemoteOutput | None:
        """Return the output whose run a folder holds; None if the folder is any other."""
        try:
            address = OutputRecord.read(directory.parent).asked
        except (OSError, ValueError):
            return None
        return cls(address=address, place=directory.parent)

    @property
    def directory(self) -> Path:
        """The folder to write the run to."""
        return self.place / OUTPUT_RUN

    def open(self) -> None:
        """Ask whether a run can be put at the address, and make the folder that it is written to.

        Raises:
            RemoteError: There is no such bucket, or it cannot be reached.
        """
        open_remote(self.address).check_place()
        make_folder(self.place)
        (self.place / OUTPUT_PUT).unlink(missing_ok=True)
        OutputRecord(asked=self.address).write(self.place)

    def read_there(self) -> Manifest | None:
        """Read the manifest at the address as it is now; None if there is none that can be read.

        Raises:
            RemoteError: The server refuses, or is away.
            CheckpointError: The same of a hub.
        """
        folder = open_remote(self.address)
        try:
            file = folder.find(MANIFEST_NAME)
        except NoRepositoryError:
            return None
        if file is None:
            return None
        with tempfile.TemporaryDirectory() as temporary:
            folder.fetch(file, Path(temporary) / MANIFEST_NAME)
            try:
                return Manifest.read(temporary)
            except CaptureError:
                return None

    def put(self, *, overwrites: bool) -> None:
        """Put the run at its address if it is whole, and keep it as the address's mirror; else it stays here.

        Args:
            overwrites: Whether another finished capture at the address is replaced.

        Raises:
            CaptureError: Another finished capture is at the address.
            RemoteError: The run cannot be put there.
            CheckpointError: The same of a hub.
        """
        # Of two processes the second finds nothing left to put.
        with locked_file(self.place):
            files = {
                path.relative_to(self.directory).as_posix(): path
                for path in sorted(self.directory.rglob("*"))
                if path.is_file() and not _is_hidden(path.relative_to(self.directory))
            }
            if not files:
                return
            # A search writes records, and no capture of its own.
            manifest = Manifest.read(self.directory) if MANIFEST_NAME in files else None
            if manifest is not None and not manifest.is_complete:
                logger.warning("%s is not whole, and stays in %s.", self.address, self.directory)
                return
            self._send(files, None if overwrites else manifest)
            if manifest is None:
                (self.place / OUTPUT_PUT).touch()
            else:
                adopt_mirror(self.directory, self.address)
                shutil.rmtree(self.place, ignore_errors=True)

    def _send(self, files: Mapping[str, Path], manifest: Manifest | None) -> None:
        """Put files at the address; with their `manifest`, unless another finished capture is there."""
        try:
            if manifest is not None:
                self._refuse_other(manifest)
            open_remote(self.address).put(files, last=MANIFEST_NAME)
        except (RemoteError, CheckpointError) as error:
            raise type(error)(
                error.what,
                expected=error.expected,
                found=error.found,
                next_step=f"{error.next_step or ''} The run is whole in {self.directory}: the same command puts it, "
                "and computes nothing again.".lstrip(),
            ) from error

    def _refuse_other(self, manifest: Manifest) -> None:
        """Raise if a finished capture at the address is another one than this run, or is certified and this is not."""
        there = self.read_there()
        if there is None or not there.is_complete:
            return
        differing = there.description.differences(manifest.description)
        if there.is_certified and not manifest.is_certified:
            differing.append("certificate")
        if differing:
            raise CaptureError(
                f"another finished capture was put at {self.address} while this one ran",
                found=f"other {', '.join(differing)}",
                next_step=f"This run is whole in {self.directory}. To replace the other: the same command with "
                "--overwrite, which computes nothing again.",
            )


def _is_hidden(path: Path) -> bool:
    """Decide whether a file or one of its folders is hidden, such as the temporary folders of killed runs."""
    return any(part.startswith(".") for part in path.parts)


def kept_directory(directory: Path) -> Path:
    """Return the folder that holds a finished run: `directory`, or the mirror of the address that it goes to."""
    output = RemoteOutput.find(directory)
    if output is None or is_finished(directory):
        return directory
    return mirror_capture(output.address)


def is_finished(directory: Path) -> bool:
    """Decide whether a folder holds a finished capture."""
    try:
        return Manifest.read(directory).is_complete
    except CaptureError:
        return False


def cached_address(folder: CachedFolder) -> str | None:
    """Return the address that a folder of the cache is of; None if it does not say."""
    if folder.kind == OUTPUTS:
        output = RemoteOutput.find(folder.path / OUTPUT_RUN)
        return None if output is None else str(output.address)
    address = address_of(folder.path)
    return None if address == str(folder.path) else address

"""RemoteOutput: a run that is written on this machine, and put at a remote address once it is whole.

    <cache>/outputs/NAME-DIGEST/.output.json         the address, and what was there when the command began
    <cache>/outputs/NAME-DIGEST/there/manifest.json  manifest of the capture that was there, if there was one
    <cache>/outputs/NAME-DIGEST/run/                 the run, until it is put; then it becomes the address's mirror

So a whole run in the folder is one that could not be put yet. The same command puts it, and computes nothing again.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.capture.manifest import MANIFEST_NAME, Manifest
from minimax_tools.capture.mirror import OUTPUT_NAME, adopt_mirror, mirror_capture
from minimax_tools.errors import CaptureError, RemoteError
from minimax_tools.hub.dataset_folder import open_remote
from minimax_tools.hub.faults import NoRepositoryError
from minimax_tools.machine.json_file import read_json
from minimax_tools.machine.whole_file import whole_file
from minimax_tools.remote.address import RemoteAddress
from minimax_tools.remote.cache import OUTPUT_RUN, OUTPUTS, RemoteCache, make_folder
from minimax_tools.remote.remote_folder import RemoteFile, RemoteFolder

logger = logging.getLogger(__name__)

_THERE = "there"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOutput:
    """The folder on this machine of a run that goes to a remote address."""

    address: RemoteAddress
    place: Path  # its folder in the cache

    @classmethod
    def open(cls, address: RemoteAddress, *, cache: RemoteCache | None = None) -> RemoteOutput:
        """Look at an address, and make the folder of the run that goes there.

        Raises:
            RemoteError: There is no such bucket, or it cannot be read.
            CheckpointError: The same of a hub.
        """
        cache = cache or RemoteCache.from_environment()
        output = cls(address=address, place=cache.place(OUTPUTS, address, str(address)))
        folder = open_remote(address)
        try:
            there = folder.find(MANIFEST_NAME)
        except NoRepositoryError:
            logger.info("%s is made when the run is put there.", address)
            there = None
        make_folder(output.place)
        output._remember(folder, there)
        return output

    @classmethod
    def find(cls, directory: Path) -> RemoteOutput | None:
        """Return the output whose run a folder holds; None if the folder is any other."""
        try:
            record = read_json(directory.parent / OUTPUT_NAME)
            return cls(address=RemoteAddress.parse(record["asked"]), place=directory.parent)
        except (OSError, ValueError, KeyError):
            return None

    @property
    def directory(self) -> Path:
        """The folder to write the run to."""
        return self.place / OUTPUT_RUN

    @property
    def there(self) -> Manifest | None:
        """The manifest that was at the address when the command began; None if there was none that can be read."""
        try:
            return Manifest.read(self.place / _THERE)
        except CaptureError:
            return None

    def put(self, *, overwrites: bool) -> None:
        """Put the run at its address if it is whole, and keep it as the address's mirror; else it stays here.

        Args:
            overwrites: Whether a capture that came to the address since the command began is replaced.

        Raises:
            RemoteError: Another capture came to the address, or the run cannot be put there.
        """
        files = {
            path.relative_to(self.directory).as_posix(): path
            for path in sorted(self.directory.rglob("*"))
            if path.is_file() and not path.name.startswith(".")
        }
        # A search writes records, and no capture of its own.
        is_capture = MANIFEST_NAME in files
        if is_capture and not Manifest.read(self.directory).is_complete:
            logger.warning("%s is not whole, and stays in %s.", self.address, self.directory)
            return
        if not files:
            return
        folder = open_remote(self.address)
        if is_capture and not overwrites:
            self._refuse_newcomer(folder)
        try:
            folder.put(files, last=MANIFEST_NAME)
        except RemoteError as error:
            raise type(error)(
                error.what,
                expected=error.expected,
                found=error.found,
                next_step=f"{error.next_step or ''} The run is whole in {self.directory}: the same command puts it, "
                "and computes nothing again.".lstrip(),
            ) from error
        if is_capture:
            adopt_mirror(self.directory, self.address)
            shutil.rmtree(self.place, ignore_errors=True)

    def _remember(self, folder: RemoteFolder, there: RemoteFile | None) -> None:
        shutil.rmtree(self.place / _THERE, ignore_errors=True)
        if there is not None:
            folder.fetch(there, self.place / _THERE / MANIFEST_NAME)
        record = {"asked": str(self.address), "tag": "" if there is None else there.tag}
        with whole_file(self.place / OUTPUT_NAME) as file:
            json.dump(record, file)

    def _refuse_newcomer(self, folder: RemoteFolder) -> None:
        """Raise if another capture is at the address than when the command began, and not the one to put."""
        try:
            now = folder.find(MANIFEST_NAME)
        except NoRepositoryError:
            return
        known = read_json(self.place / OUTPUT_NAME)["tag"]
        if now is None or now.tag == known:
            return
        fetched = self.place / f"{_THERE}.now"
        folder.fetch(now, fetched)
        is_own = fetched.read_bytes() == (self.directory / MANIFEST_NAME).read_bytes()
        fetched.unlink()
        if not is_own:
            raise RemoteError(
                f"another capture was put at {self.address} while this one ran",
                next_step=f"This run is whole in {self.directory}. To replace the other: the same command with "
                "--overwrite, which computes nothing again.",
            )


def kept_directory(directory: Path) -> Path:
    """Return the folder that holds a finished run: `directory`, or the mirror of the address that it goes to."""
    output = RemoteOutput.find(directory)
    if output is None or (directory / MANIFEST_NAME).exists():
        return directory
    return mirror_capture(output.address)

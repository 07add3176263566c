"""CaptureMirror: a capture at a remote address as a folder on this machine, its files fetched when they are read.

The folder holds the manifest and the other JSON files from the start, and the address in `.address.json`. So its path
may be given to other processes like any capture's. A tensor file is fetched whole when it is read for the first time,
and each of its tensors is checked against the manifest: a command about layer 3 fetches the files of layer 3.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import CaptureError, NetworkLossError, list_names
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.remote.address import RemoteAddress, RemoteFolder, is_remote
from minimax_tools.remote.cache import ADDRESS_NAME, CAPTURES, RemoteCache, locked_file, mark_used

logger = logging.getLogger(__name__)
_MAX_NAMED = 5
_PUBLISH_AGAIN = (
    "Run again: another capture may have been put there meanwhile. Else publish it again from where it was made: "
    "mm2-gpu publish."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorRecord:
    """The address of the capture that a folder mirrors."""

    address: RemoteAddress  # at the commit that the manifest is of, if the server has commits
    asked: RemoteAddress  # as it was asked for

    @classmethod
    def read(cls, directory: Path) -> MirrorRecord:
        """Read the record in a mirror's folder; raise OSError if there is none, ValueError if it is damaged."""
        return decode(cls, read_own_json(directory / ADDRESS_NAME))

    def write(self, directory: Path) -> None:
        """Write the record into a mirror's folder."""
        with whole_file(directory / ADDRESS_NAME) as file:
            json.dump(encode(self), file)


def address_of(directory: Path) -> str:
    """Return the address of the capture that a folder mirrors; of other folders their path."""
    try:
        return str(MirrorRecord.read(directory).asked)
    except (OSError, ValueError):
        return str(directory)


def capture_folder(place: Path | str) -> Path:
    """Return the folder of a capture that is named by its path, or by a text such as `s3://bucket/golden`."""
    if isinstance(place, str) and is_remote(place):
        return mirror_capture(RemoteAddress.parse(place))
    return Path(place).expanduser()


def mirror_capture(address: RemoteAddress) -> Path:
    """Return the folder that stands for the capture at an address; its tensor files come when they are read.

    If the server does not answer, the capture that the address named last is taken, with a warning.
    """
    cache, folder = RemoteCache.from_environment(), open_remote(address)
    try:
        file = folder.find(MANIFEST_NAME)
    except NetworkLossError:
        known = next(filter(_is_whole, cache.versions(CAPTURES, address)), None)
        if known is None:
            raise
        logger.warning("%s does not answer: taking what it was when it was read last, in %s.", address, known)
        mark_used(known)
        return known
    if file is None:
        raise _no_capture(folder)
    directory = cache.place(CAPTURES, address, file.tag)
    if not _is_whole(directory):
        with locked_file(directory), tempfile.TemporaryDirectory() as temporary:
            folder.fetch(file, Path(temporary) / MANIFEST_NAME)
            _begin(directory, address, folder, Path(temporary) / MANIFEST_NAME)
    mark_used(directory)
    return directory


def open_remote(address: RemoteAddress) -> RemoteFolder:
    """Return the folder at an address of any scheme; nothing is asked yet."""
    # Here, because most captures lie on this machine.
    from minimax_tools.hub.dataset_folder import open_folder

    return open_folder(address)


def share_files(mirror: Path, other: Path) -> None:
    """Give a mirror's tensor files to another mirror, whose manifest lists the same tensors."""
    for path in mirror.glob("*.safetensors"):
        if not (other / path.name).exists():
            os.link(path, other / path.name, follow_symlinks=False)


@dataclass(frozen=True, kw_only=True)
class CaptureMirror:
    """A folder that stands for a capture at an address."""

    directory: Path
    address: RemoteAddress  # at the commit that the manifest is of, if the server has commits
    manifest: Manifest

    @classmethod
    def find(cls, directory: Path, manifest: Manifest) -> CaptureMirror | None:
        """Return the mirror in a folder; None if the folder is no mirror."""
        try:
            record = MirrorRecord.read(directory)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CaptureError(
                f"{directory / ADDRESS_NAME} cannot be read: it keeps the address of the capture",
                found=str(error),
                next_step="Name the capture by its address, not by this folder of the cache.",
            ) from error
        return cls(directory=directory, address=record.address, manifest=manifest)

    def hold(self, name: str) -> None:
        """Fetch a file unless it is here. A file that comes damaged is fetched once more."""
        path = self.directory / name
        if path.exists():
            return
        with locked_file(path):
            if not path.exists():
                self._fetch(name, path)

    def hold_all(self) -> None:
        """Fetch all files that are not here; raise as `hold` does."""
        for name in self.manifest.file_names():
            self.hold(name)

    @cached_property
    def _folder(self) -> RemoteFolder:
        return open_remote(self.address)

    def _fetch(self, name: str, path: Path) -> None:
        file = self._folder.find(name)
        if file is None:
            raise CaptureError(
                f"{self.address} holds no {name}, which its manifest lists", next_step=_PUBLISH_AGAIN
            )
        arriving = path.with_name(f".{name}.arriving")
        for _ in range(2):
            self._folder.fetch(file, arriving)
            damage = self.manifest.find_damage(name, arriving)
            if damage is None:
                arriving.replace(path)
                return
            self._folder.forget(file, arriving)
            logger.warning("%s of %s came damaged: %s.", name, self.address, damage)
        raise CaptureError(
            f"{name} of {self.address} came damaged twice",
            expected="what its manifest lists",
            found=damage,
            next_step=_PUBLISH_AGAIN,
        )


def _begin(directory: Path, address: RemoteAddress, folder: RemoteFolder, arrived: Path) -> None:
    """Make a mirror's folder: its address, the JSON files and, at last, the manifest that has arrived."""
    try:
        manifest = Manifest.read(arrived.parent)
    except CaptureError as error:
        raise CaptureError(
            f"{MANIFEST_NAME} of {address} is damaged, or of another mm2",
            expected=error.expected,
            found=error.found or error.what,
            next_step="Publish it again from where it was made, or read it with the mm2 that made it.",
        ) from error
    directory.mkdir(parents=True, exist_ok=True)
    MirrorRecord(address=folder.address, asked=address).write(directory)
    mirror = CaptureMirror(directory=directory, address=folder.address, manifest=manifest)
    for name in manifest.text_digests:
        mirror.hold(name)
    with whole_file(directory / MANIFEST_NAME, newline="") as file:
        file.write(arrived.read_bytes().decode())


def _is_whole(directory: Path) -> bool:
    """Decide whether a mirror has its manifest, its address and the JSON files.

    A disk that lost power may have spoilt them, and a hub's file is a link, which leads nowhere once its cache is
    cleared.
    """
    try:
        manifest, record = Manifest.read(directory), MirrorRecord.read(directory)
    except (CaptureError, OSError, ValueError):
        return False
    is_of_address = directory in RemoteCache(folder=directory.parents[1]).versions(CAPTURES, record.asked)
    return is_of_address and all((directory / name).exists() for name in manifest.text_digests)


def _no_capture(folder: RemoteFolder) -> CaptureError:
    """Build the error for an address without a manifest: half published, or not a capture's."""
    names = list(folder.files())
    if any(name.endswith(".safetensors") and "/" not in name for name in names):
        return CaptureError(
            f"the capture at {folder.address} is not whole: {MANIFEST_NAME} comes last, and is not there yet",
            found=f"{len(names)} files",
            next_step="Wait, or publish it again: what is there is not sent twice.",
        )
    below = sorted({name.rpartition("/")[0] for name in names if name.endswith(f"/{MANIFEST_NAME}")})
    return CaptureError(
        f"no capture at {folder.address}",
        expected=MANIFEST_NAME,
        found=list_names(names, most=_MAX_NAMED) or "nothing",
        next_step=f"Name one of the captures in it: {list_names(below, most=_MAX_NAMED)}."
        if below
        else "Check the address, or publish one: mm2-gpu publish.",
    )

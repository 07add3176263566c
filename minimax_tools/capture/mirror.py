"""CaptureMirror: a capture at a remote address as a folder on this machine, its files fetched when they are read.

The folder holds the manifest and the other JSON files from the start, and the address, in a file of its own. So its
path may be given to other processes like any capture's. A tensor file that is read for the first time is fetched whole,
and each of its tensors is checked against the manifest: a command about layer 3 fetches the files of layer 3.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open

from minimax_tools.capture.address_records import MirrorRecord, NewestRecord
from minimax_tools.capture.digests import TensorDigest, describe_tensor
from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.passes import GENERATION_NAME, PASSES_NAME
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import CaptureError, NetworkLossError, list_names
from minimax_tools.hub.dataset_folder import open_remote
from minimax_tools.json_codec import decode
from minimax_tools.machine.files import digest_file, whole_file
from minimax_tools.machine.json_file import parse_json
from minimax_tools.remote.address import RemoteAddress, is_remote
from minimax_tools.remote.cache import (
    ADDRESS_NAME,
    CAPTURES,
    RemoteCache,
    is_version,
    locked_file,
    mark_used,
)
from minimax_tools.remote.remote_folder import RemoteFile, RemoteFolder

logger = logging.getLogger(__name__)

_TEXTS = (GENERATION_NAME, PASSES_NAME)
_MAX_NAMED = 5


def capture_folder(place: Path | str) -> Path:
    """Return the folder of a capture that is named by its path, or by a text such as `s3://bucket/golden`.

    Raises:
        UsageError: The text is no address that mm2 reads.
        CannotRunError: An address cannot be read, or holds no capture.
    """
    if isinstance(place, str) and is_remote(place):
        return mirror_capture(RemoteAddress.parse(place))
    return Path(place).expanduser()


def mirror_capture(address: RemoteAddress, *, cache: RemoteCache | None = None) -> Path:
    """Return the folder that stands for the capture at an address; its tensor files come when they are read.

    If the server does not answer, the capture that the address named last is taken, with a warning.

    Raises:
        CaptureError: There is no whole capture at the address, or its manifest is damaged.
        RemoteError: The server refuses, or is away and nothing is cached.
        CheckpointError: The same of a hub.
    """
    cache = cache or RemoteCache.from_environment()
    try:
        directory = _mirror_newest(address, open_remote(address), cache)
    except NetworkLossError:
        known = _find_known(cache.address_file(address))
        if known is None:
            raise
        logger.warning("%s does not answer: taking what it was when it was read last, in %s.", address, known)
        directory = known
    mark_used(directory)
    return directory


def adopt_mirror(directory: Path, address: RemoteAddress, *, cache: RemoteCache | None = None) -> Path:
    """Make a capture's folder in the cache the mirror of the address that it was put at, and return the mirror.

    Raises:
        RemoteError: The server refuses, or is away.
        CheckpointError: The same of a hub.
    """
    cache = cache or RemoteCache.from_environment()
    mirror = _mirror_place(cache, address, (directory / MANIFEST_NAME).read_bytes())
    # A hub names the commit that has the files now.
    folder = open_remote(address)
    file = folder.find(MANIFEST_NAME)
    with locked_file(mirror):
        if _is_whole(mirror):
            shutil.rmtree(directory)
        else:
            shutil.rmtree(mirror, ignore_errors=True)
            MirrorRecord(address=folder.address, asked=address).write(directory)
            directory.rename(mirror)
    if file is not None:
        _remember(cache.address_file(address), mirror, tag=file.tag)
    return mirror


def share_files(mirror: Path, other: Path) -> None:
    """Give a mirror's tensor files to another mirror, whose manifest lists the same tensors."""
    for path in mirror.glob("*.safetensors"):
        if not (other / path.name).exists():
            os.link(path, other / path.name, follow_symlinks=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ListedTexts:
    """The JSON files that a manifest lists, by name."""

    text_digests: Mapping[str, str]


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
        """Fetch a tensor file unless it is here. A file that comes damaged is fetched once more.

        Raises:
            CaptureError: It came damaged twice, or the address has no such file.
            RemoteError: It could not be fetched.
            CheckpointError: The same of a hub.
        """
        path = self.directory / name
        if path.exists():
            return
        with locked_file(path):
            if path.exists():
                return
            file = self._folder.find(name)
            if file is None:
                raise CaptureError(
                    f"{self.address} holds no {name}, which its manifest lists",
                    next_step=self._advise("Publish it again from where it was made: mm2-gpu publish."),
                )
            self._fetch(file, path)

    def hold_all(self) -> None:
        """Fetch all files that are not here; raise as `hold` does."""
        for name in self.manifest.file_names():
            if name != MANIFEST_NAME:
                self.hold(name)

    @cached_property
    def _folder(self) -> RemoteFolder:
        return open_remote(self.address)

    def _fetch(self, file: RemoteFile, path: Path) -> None:
        arriving = path.with_name(f".{path.name}.arriving")
        for is_last in (False, True):
            self._folder.fetch(file, arriving)
            damage = self._find_damage(file.name, arriving)
            if damage is None:
                arriving.replace(path)
                return
            self._folder.forget(file, arriving)
            if not is_last:
                logger.warning(
                    "%s of %s came damaged (%s): fetching it once more.", file.name, self.address, damage
                )
        raise CaptureError(
            f"{file.name} of {self.address} came damaged twice",
            expected="the tensors that its manifest lists",
            found=damage,
            next_step=self._advise("It is damaged there: publish it again from where it was made."),
        )

    def _advise(self, otherwise: str) -> str:
        """Return the advice where a file is not what the manifest lists; `otherwise` if nobody replaced the capture."""
        file = self._folder.find(MANIFEST_NAME)
        if file is not None:
            with tempfile.TemporaryDirectory() as temporary:
                there = Path(temporary) / MANIFEST_NAME
                self._folder.fetch(file, there)
                if _is_mirror_of(self.directory, there.read_bytes()):
                    return otherwise
        return "Another capture was put there since this one was opened. Run again: that takes the new one."

    def _find_damage(self, name: str, path: Path) -> str | None:
        """Describe the first tensor that differs from the manifest; None if all are as they were written."""
        expected = self._listed(name)
        try:
            with safe_open(path, framework="pt") as tensors:
                if differing := sorted(expected.keys() ^ set(tensors.keys())):
                    return f"other tensors: {list_names(differing, most=_MAX_NAMED)}"
                for tensor_name, digest in expected.items():
                    found = describe_tensor(tensors.get_tensor(tensor_name))
                    if found != digest:
                        return f"{tensor_name}: {found} for {digest}"
        except (OSError, SafetensorError) as error:
            return str(error)
        return None

    def _listed(self, name: str) -> Mapping[str, TensorDigest]:
        """Return the digests of a file's tensors by name."""
        listed = {entry.site: entry.digest for entry in self.manifest.entries if entry.file == name}
        for file in self.manifest.digests.tensors:
            if file.file == name:
                listed |= dict(file.tensors)
        return listed


def _mirror_newest(address: RemoteAddress, folder: RemoteFolder, cache: RemoteCache) -> Path:
    """Return the mirror of what the address names now."""
    file = folder.find(MANIFEST_NAME)
    if file is None:
        raise _no_capture(folder)
    known = _find_known(cache.address_file(address), tag=file.tag)
    if known is not None:
        return known
    with tempfile.TemporaryDirectory() as temporary:
        text = Path(temporary) / MANIFEST_NAME
        folder.fetch(file, text)
        content = text.read_bytes()
        manifest = _read_manifest(text, address)
    directory = _mirror_place(cache, address, content)
    if not _is_whole(directory):
        with locked_file(directory):
            if not _is_whole(directory):
                _begin(directory, address, folder, manifest, content)
    _remember(cache.address_file(address), directory, tag=file.tag)
    return directory


def _mirror_place(cache: RemoteCache, address: RemoteAddress, manifest: bytes) -> Path:
    """Return the folder of the capture that a manifest at an address describes."""
    return cache.place(CAPTURES, address, _version(str(address), manifest))


def _version(address: str, manifest: bytes) -> str:
    """Return the version of a capture's mirror. The same capture at two addresses has two mirrors."""
    return f"{address} {hashlib.sha256(manifest).hexdigest()}"


def _is_mirror_of(directory: Path, manifest: bytes) -> bool:
    """Decide whether a folder mirrors its address as it was with a manifest; raise as `MirrorRecord.read` does."""
    return is_version(directory, _version(str(MirrorRecord.read(directory).asked), manifest))


def _is_whole(directory: Path) -> bool:
    """Decide whether a mirror has its manifest, its address and the JSON files.

    A disk that lost power may have spoilt them, and a hub's file is a link, which leads nowhere once its cache is
    cleared.
    """
    try:
        content = (directory / MANIFEST_NAME).read_bytes()
        is_mirror = _is_mirror_of(directory, content)
        listed = decode(_ListedTexts, parse_json(content)).text_digests
    except (OSError, ValueError):
        return False
    return is_mirror and all((directory / name).exists() for name in _TEXTS if name in listed)


def _read_manifest(path: Path, address: RemoteAddress) -> Manifest:
    try:
        return Manifest.read(path.parent)
    except CaptureError as error:
        found = error.found or error.what
        raise CaptureError(
            f"{MANIFEST_NAME} of {address} is damaged, or of another mm2",
            expected=error.expected,
            found=found,
            next_step="Publish it again from where it was made, or read it with the mm2 that made it.",
        ) from error


def _begin(
    directory: Path, address: RemoteAddress, folder: RemoteFolder, manifest: Manifest, content: bytes
) -> None:
    """Make the mirror's folder: the JSON files, the address, and at last the manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, sha256 in manifest.digests.texts:
        if name in _TEXTS:
            _fetch_text(folder, name, directory / name, sha256)
    MirrorRecord(address=folder.address, asked=address).write(directory)
    with whole_file(directory / MANIFEST_NAME, newline="") as file:
        file.write(content.decode())


def _fetch_text(folder: RemoteFolder, name: str, path: Path, sha256: str) -> None:
    """Fetch a JSON file, once more if it does not have its digest."""
    file = folder.find(name)
    found = "no such file"
    for _ in range(2 if file is not None else 0):
        assert file is not None, "there is one here"
        folder.fetch(file, path)
        found = digest_file(path)
        if found == sha256:
            return
        folder.forget(file, path)
    raise CaptureError(
        f"{name} of {folder.address} is not as it was written",
        expected=f"sha256 {sha256[:16]}…",
        found=found,
        next_step="Publish it again from where it was made: mm2-gpu publish.",
    )


def _no_capture(folder: RemoteFolder) -> CaptureError:
    """Build the error for an address without a manifest: half published, or not a capture's."""
    names = list(folder.files())
    if any(name.endswith(".safetensors") and "/" not in name for name in names):
        return CaptureError(
            f"the capture at {folder.address} is not whole: {MANIFEST_NAME} comes last, and is not there yet",
            found=f"{len(names)} files",
            next_step="Wait, or publish it again: what is there is not sent twice.",
        )
    if folder.address.path.rpartition("/")[2] == MANIFEST_NAME:
        return CaptureError(
            f"{folder.address} is a file",
            expected="the folder of a capture",
            next_step=f"Leave out /{MANIFEST_NAME}.",
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


def _find_known(path: Path, *, tag: str | None = None) -> Path | None:
    """Return the mirror that an address had last; None if there is none, or its manifest had another `tag`."""
    known = NewestRecord.find(path)
    if known is None or tag not in (None, known.tag):
        return None
    directory = Path(known.directory)
    return directory if _is_whole(directory) else None


def _remember(path: Path, directory: Path, *, tag: str) -> None:
    try:
        NewestRecord(directory=str(directory), tag=tag).write(path)
    except OSError as error:
        # A cache that others filled, and that may only be read: the manifest is asked for each time.
        logger.debug("%s cannot be written: %s", path, error)

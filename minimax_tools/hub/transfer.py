"""Transfers of single files of one commit into the cache, resumed by range and verified by hash.

huggingface_hub does the requests, the cache and the xet protocol. It lacks two things. From 2.0 on it drops the
received part of a file when the connection breaks, and no version compares hashes. So a file that comes over plain
HTTP is first written to its *part*, a file beside the cache's blobs (blob: a file's content, named after its hash). A
part that a broken connection or an earlier run left is resumed. Once it is whole and verified, it becomes the blob.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubCommit, HubFile, hub_tools
from minimax_tools.hub.faults import Attempts, BrokenTransferError, FetchStoppedError, translate

logger = logging.getLogger(__name__)

_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
# Bytes of a body that are received at once, and of a file that are hashed at once.
_CHUNK_BYTES = 1 << 16
_HASHED_AT_ONCE_BYTES = 1 << 20
_MAX_SHOWN = 100


class HubTransfer:
    """Transfers of files of one commit; safe to use from several threads.

    Args:
        commit: Commit to fetch from.
        stop: Event that ends all transfers.
        on_bytes: Called with the bytes of every received piece; negative when received bytes are dropped.
    """

    def __init__(
        self, commit: HubCommit, *, stop: threading.Event, on_bytes: Callable[[int], object]
    ) -> None:
        self._commit = commit
        self._access = commit.access
        self._stop = stop
        self._on_bytes = on_bytes

    def fetch(self, file: HubFile) -> Path:
        """Return the file's path in the snapshot, fetched if it is absent or has another size.

        Raises:
            CheckpointError: The file could not be fetched or stored, or came corrupted twice.
            FetchStoppedError: `stop` was set.
        """
        if self._commit.holds(file):
            return self._commit.folder / file.name
        try:
            metadata = self._attempts(file).run(lambda: self._read_metadata(file))
            self._refuse_other_place(file, metadata.etag)
            # A mirror may send an etag that is no hash.
            hashes = [text for text in (metadata.etag, file.content_hash) if _is_hash(text)]
            expected = HubFile(
                name=file.name,
                size_bytes=file.size_bytes if metadata.size is None else metadata.size,
                content_hash=hashes[0] if hashes else None,
            )
            if metadata.xet_file_data is not None and _speaks_xet():
                path = self._fetch_by_xet(expected)
                if path is not None:
                    return path
            self._fetch_blob(expected, self._commit.blob(metadata.etag))
            # huggingface_hub finds the blob by its etag, fetches nothing and links it into the snapshot.
            return self._download(file)
        except FetchStoppedError:
            raise
        except Exception as error:
            raise translate(error, self._commit, file=file.name) from error

    def _refuse_other_place(self, file: HubFile, etag: str) -> None:
        """Raise if an etag leads out of the cache's folder of blobs: it is their file name."""
        if not etag or etag.startswith(".") or {"/", "\\", "\0"} & set(etag):
            raise CheckpointError(
                f"{file.name} of {self._commit.model} has an etag that is no name for a file",
                expected="its sha256, or another plain name",
                found=repr(etag)[:_MAX_SHOWN],
                next_step="Check HF_ENDPOINT: this is no right hub.",
            )

    def _read_metadata(self, file: HubFile) -> Any:
        """Ask for the file's etag and size, and whether the hub offers it by xet, its protocol for large files."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        return get_hf_file_metadata(
            hf_hub_url(
                self._commit.model,
                file.name,
                repo_type=str(self._commit.kind),
                revision=self._commit.commit,
                endpoint=self._access.endpoint,
            ),
            token=self._access.token,
            timeout=self._access.timeout_s,
        )

    def _download(self, file: HubFile) -> Path:
        """Call huggingface_hub's download: it fetches by xet, and links a blob that is there into the snapshot."""
        from huggingface_hub import hf_hub_download

        link = self._commit.folder / file.name
        if (link.exists() or link.is_symlink()) and not self._commit.holds(file):
            # huggingface_hub would take a copy of another size, or one elsewhere, as it is.
            link.unlink(missing_ok=True)
        path = self._attempts(file).run(
            lambda: hf_hub_download(
                self._commit.model,
                file.name,
                repo_type=str(self._commit.kind),
                revision=self._commit.commit,
                cache_dir=self._access.cache_dir,
                endpoint=self._access.endpoint,
                token=self._access.token,
                etag_timeout=self._access.timeout_s,
            ),
        )
        return Path(path)

    def _fetch_by_xet(self, file: HubFile) -> Path | None:
        """Return the file in the snapshot, or None if plain HTTP is needed."""
        try:
            path = self._download(file)
            damage = _find_damage(path, file)
        except FetchStoppedError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            logger.warning("%s does not come by xet (%s): fetching it over HTTP.", file.name, reason)
            return None
        if damage is not None:
            logger.warning("%s came by xet with %s: fetching it over HTTP.", file.name, damage)
            self._commit.discard(file.name)
            return None
        self._on_bytes(file.size_bytes or 0)
        return path

    def _fetch_blob(self, file: HubFile, blob: Path) -> None:
        """Fetch the file as a blob of the cache, unless it is there."""
        blob.parent.mkdir(parents=True, exist_ok=True)
        # Lock and part have the names of huggingface_hub before 2.0, so two programs share the work.
        lock = self._access.cache_dir / ".locks" / self._commit.cache.name / f"{blob.name}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with hub_tools().WeakFileLock(lock):
            if blob.is_file() and not blob.is_symlink() and file.size_bytes == blob.stat().st_size:
                self._on_bytes(file.size_bytes)
                return
            part = self._commit.part(blob.name)
            self._receive_verified(file, part)
            part.replace(blob)

    def _receive_verified(self, file: HubFile, part: Path) -> None:
        """Receive the file into `part`, once more if it comes corrupted."""
        for is_last in (False, True):
            self._receive(file, part)
            damage = _find_damage(part, file)
            if damage is None:
                return
            self._on_bytes(-part.stat().st_size)
            part.unlink()
            if not is_last:
                logger.warning("%s came corrupted (%s): fetching it anew.", file.name, damage)
        raise CheckpointError(
            f"{file.name} of {self._commit.model} came corrupted twice from {self._access.endpoint}",
            expected=f"{file.size_bytes} bytes of {_hash_kind(file)} {file.content_hash}",
            found=damage,
            next_step="A proxy or mirror may spoil it: try another HF_ENDPOINT or network, or fetch it with "
            "`hf download` elsewhere and give "
            f"{self._commit.kind.option} the folder.",
        )

    def _receive(self, file: HubFile, part: Path) -> None:
        """Receive the bytes that `part` lacks. If a response breaks off, the next request goes on where it ended."""
        attempts = self._attempts(file)
        # A part that is too long is wrong, and if the size is unknown, so is what an earlier run's part lacks. A link
        # leads to what is no part.
        if part.is_symlink() or file.size_bytes is None or _size(part) > file.size_bytes:
            part.unlink(missing_ok=True)
        # An empty file needs no request.
        part.touch()
        self._on_bytes(_size(part))
        while _size(part) != file.size_bytes:
            size_before = _size(part)
            try:
                self._receive_once(file, part)
                if file.size_bytes is None:
                    # A response that ended well was the whole file.
                    return
            except Exception as error:
                if _size(part) > size_before:
                    attempts.forget_failures()
                # Returns when another attempt is due; raises `error` if none is left or none would help.
                attempts.wait_after(error)

    def _receive_once(self, file: HubFile, part: Path) -> None:
        """Request the bytes behind the part, and append them. A part that gets too long is removed.

        Raises:
            BrokenTransferError: The part is not whole afterwards.
        """
        start = _size(part)
        byte_range = f"bytes={start}-" if start else None
        with open_body(self._commit, file.name, byte_range=byte_range) as (response, chunks):
            is_continued = response.status_code == 206
            if start and not is_continued:
                # The server ignores ranges: the whole file comes again, and replaces the part.
                self._on_bytes(-start)
            with part.open("ab" if is_continued else "wb") as output:
                for chunk in chunks:
                    if self._stop.is_set():
                        raise FetchStoppedError
                    output.write(chunk)
                    self._on_bytes(len(chunk))
        size_bytes = _size(part)
        if file.size_bytes is not None and size_bytes > file.size_bytes:
            self._on_bytes(-size_bytes)
            part.unlink()
        if file.size_bytes not in (None, size_bytes):
            raise BrokenTransferError(f"the body ended after {size_bytes} of {file.size_bytes} bytes")

    def _attempts(self, file: HubFile) -> Attempts:
        return Attempts(self._access, name=file.name, stop=self._stop)


@contextmanager
def open_body(
    commit: HubCommit, name: str, *, byte_range: str | None = None
) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """Request a file by name, and yield the response and its body, piece by piece as it arrives.

    `byte_range` is the header `Range`, as in `bytes=0-7`; None asks for the whole file.
    """
    from huggingface_hub import hf_hub_url

    tools, access = hub_tools(), commit.access
    headers = {
        **tools.build_hf_headers(token=access.token),
        # A compressed body has other bytes than the file.
        "Accept-Encoding": "identity",
        **({"Range": byte_range} if byte_range else {}),
    }
    url = hf_hub_url(
        commit.model, name, repo_type=str(commit.kind), revision=commit.commit, endpoint=access.endpoint
    )
    session = tools.get_session()
    # The session is one of httpx or, before huggingface_hub 1.0, of requests.
    if callable(getattr(session, "stream", None)):
        with session.stream("GET", url, headers=headers, timeout=access.timeout_s) as response:
            tools.hf_raise_for_status(response)
            yield response, response.iter_bytes()
    else:
        with session.get(url, headers=headers, timeout=access.timeout_s, stream=True) as response:
            tools.hf_raise_for_status(response)
            yield response, response.iter_content(_CHUNK_BYTES)


def hash_like(path: Path, known_hash: str) -> str:
    """Return the hash of a local file in the kind of a hub's: sha256, or git's sha1 of a small file."""
    digest = hashlib.sha256()
    if _GIT_SHA1.fullmatch(known_hash):
        # git hashes a file's size before its content.
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as content:
        while piece := content.read(_HASHED_AT_ONCE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _speaks_xet() -> bool:
    from huggingface_hub import constants
    from huggingface_hub.utils._runtime import is_xet_available

    return is_xet_available() and not getattr(constants, "HF_HUB_DISABLE_XET", False)


def _find_damage(path: Path, file: HubFile) -> str | None:
    """Describe the wrong size or hash of the file at `path`; None if both are right, or unknown."""
    size_bytes = path.stat().st_size
    if file.size_bytes not in (None, size_bytes):
        return f"{size_bytes} bytes"
    if file.content_hash is None:
        logger.warning("%s is not verified: the hub gives no hash for it.", file.name)
        return None
    actual_hash = hash_like(path, file.content_hash)
    if actual_hash == file.content_hash:
        return None
    return f"{size_bytes} bytes of {_hash_kind(file)} {actual_hash}"


def _hash_kind(file: HubFile) -> str:
    return "git sha1" if file.content_hash and _GIT_SHA1.fullmatch(file.content_hash) else "sha256"


def _is_hash(text: str | None) -> bool:
    return text is not None and bool(_SHA256.fullmatch(text) or _GIT_SHA1.fullmatch(text))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0

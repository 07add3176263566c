"""Transfers of one commit's files: whole ones into the cache, and byte ranges.

huggingface_hub fetches, locks, caches and knows xet. It compares no hashes, so mm2 does, once a file has come. It reads
a whole shard where a server ignores byte ranges, so mm2 asks for those itself; of a range no hub has a hash.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubCommit, HubFile, hub_tools
from minimax_tools.hub.faults import attempt, is_transient, translate

logger = logging.getLogger(__name__)

_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_HASHED_AT_ONCE_BYTES = 1 << 20
_MAX_SHOWN = 200


class NoRangesError(CheckpointError):
    """A server that sends whole files only."""


def fetch_file(commit: HubCommit, file: HubFile) -> Path:
    """Return the file's path in the snapshot; it is fetched if it is absent or has another size."""
    if commit.holds(file):
        return commit.folder / file.name
    try:
        metadata = attempt(lambda: _read_metadata(commit, file), access=commit.access, name=file.name)
        _refuse_other_place(commit, file, metadata.etag or "")
        return _fetch_verified(commit, file, metadata)
    except Exception as error:
        raise translate(error, commit, file=file.name) from error


def read_range(commit: HubCommit, file: HubFile, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop` of a file, `stop` not included.

    Raises:
        NoRangesError: The server sends whole files only.
    """
    if start == stop:
        return b""
    try:
        return attempt(
            lambda: _read_range_once(commit, file, start, stop), access=commit.access, name=file.name
        )
    except Exception as error:
        raise translate(error, commit, file=file.name) from error


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


def _read_metadata(commit: HubCommit, file: HubFile) -> Any:
    """Ask for the etag, and whether the hub offers the file by xet, its protocol for large files.

    The etag is the name of the content in the cache. It is the content's hash, but a mirror may send another.
    """
    from huggingface_hub import get_hf_file_metadata

    access = commit.access
    return get_hf_file_metadata(_url(commit, file), token=access.token, timeout=access.timeout_s)


def _refuse_other_place(commit: HubCommit, file: HubFile, etag: str) -> None:
    """Raise if an etag leads out of the cache's folder of blobs; links that lead out of the cache are removed."""
    if not etag or etag.startswith(".") or {"/", "\\", "\0"} & set(etag):
        raise CheckpointError(
            f"{file.name} of {commit.model} has an etag that is no name for a file",
            expected="its sha256, or another plain name",
            found=repr(etag)[:_MAX_SHOWN],
            next_step="Check HF_ENDPOINT: this is no right hub.",
        )
    # huggingface_hub before 2.0 appends to what is incomplete.
    for path in (commit.blob(etag), commit.blob(f"{etag}.incomplete")):
        if path.is_symlink() and not commit.is_inside(path):
            path.unlink()


def _fetch_verified(commit: HubCommit, file: HubFile, metadata: Any) -> Path:
    """Fetch the file into the snapshot, once more if it comes corrupted."""
    content_hash = next((text for text in (file.content_hash, metadata.etag) if _is_hash(text)), None)
    is_on_xet = metadata.xet_file_data is not None
    for is_last in (False, True):
        if not commit.holds(file):
            # huggingface_hub would take a copy of another size, or one elsewhere, as it is.
            commit.discard(file.name)
        path = attempt(
            lambda: _download(commit, file, is_on_xet=is_on_xet), access=commit.access, name=file.name
        )
        damage = _find_damage(path, file, content_hash)
        if damage is None:
            return path
        commit.discard(file.name)
        if not is_last:
            logger.warning("%s came corrupted (%s): fetching it anew.", file.name, damage)
    raise CheckpointError(
        f"{file.name} of {commit.model} came corrupted twice from {commit.access.endpoint}",
        expected=f"{file.size_bytes} bytes of {_hash_kind(content_hash)} {content_hash}",
        found=damage,
        next_step="A proxy or mirror may spoil it: try another HF_ENDPOINT or network, or fetch it with "
        f"`hf download` elsewhere and give {commit.kind.option} the folder.",
    )


def _download(commit: HubCommit, file: HubFile, *, is_on_xet: bool) -> Path:
    from huggingface_hub import hf_hub_download

    access = commit.access
    try:
        path = hf_hub_download(
            commit.model,
            file.name,
            repo_type=str(commit.kind),
            revision=commit.commit,
            cache_dir=access.cache_dir,
            endpoint=access.endpoint,
            token=access.token,
            etag_timeout=access.timeout_s,
        )
    except Exception as error:
        if not is_on_xet or is_transient(error) or getattr(error, "errno", None) is not None:
            raise
        raise CheckpointError(
            f"{file.name} of {commit.model} could not be fetched by xet from {access.endpoint}",
            found=" ".join(str(error).split())[:_MAX_SHOWN],
            next_step="Set HF_HUB_DISABLE_XET=1: then it is fetched over plain HTTP.",
        ) from error
    return Path(path)


def _find_damage(path: Path, file: HubFile, content_hash: str | None) -> str | None:
    """Describe the wrong size or hash of the file at `path`; None if both are right, or unknown."""
    size_bytes = path.stat().st_size
    if file.size_bytes not in (None, size_bytes):
        return f"{size_bytes} bytes"
    if content_hash is None:
        logger.warning("%s is not verified: the hub gives no hash for it.", file.name)
        return None
    actual_hash = hash_like(path, content_hash)
    if actual_hash == content_hash:
        return None
    return f"{size_bytes} bytes of {_hash_kind(content_hash)} {actual_hash}"


def _read_range_once(commit: HubCommit, file: HubFile, start: int, stop: int) -> bytes:
    tools, access = hub_tools(), commit.access
    headers = {
        **tools.build_hf_headers(token=access.token),
        # A compressed body has other bytes than the file.
        "Accept-Encoding": "identity",
        # The header's range includes its last byte.
        "Range": f"bytes={start}-{stop - 1}",
    }
    session, url = tools.get_session(), _url(commit, file)
    # The session is one of httpx or, before huggingface_hub 1.0, of requests.
    is_httpx = callable(getattr(session, "stream", None))
    if is_httpx:
        opened = session.stream("GET", url, headers=headers, timeout=access.timeout_s)
    else:
        opened = session.get(url, headers=headers, timeout=access.timeout_s, stream=True)
    with opened as response:
        tools.hf_raise_for_status(response)
        # Nothing of the body is read before: it may be the whole file.
        _check_range(response, commit, file, start, stop)
        data: bytes = response.read() if is_httpx else response.content
    if len(data) != stop - start:
        raise ConnectionError(f"{len(data)} of {stop - start} bytes came")
    return data


def _check_range(response: Any, commit: HubCommit, file: HubFile, start: int, stop: int) -> None:
    """Check that a response is this part of this file."""
    if response.status_code != 206:
        is_whole = response.status_code == 200
        raise NoRangesError(
            f"{commit.access.endpoint} gives no part of {file.name}",
            expected="status 206",
            found="status 200, the whole file" if is_whole else f"status {response.status_code}",
            next_step="Fetch whole files: mm2-split fetch.",
        )
    part, _, size = response.headers.get("content-range", "").partition("/")
    # A size of "*" is unknown to the server.
    if part != f"bytes {start}-{stop - 1}" or not (
        file.size_bytes is None or size in ("*", str(file.size_bytes))
    ):
        raise ConnectionError(
            f"bytes {start} to {stop - 1} of {file.size_bytes} were asked for, {part!r} of {size} came"
        )


def _url(commit: HubCommit, file: HubFile) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(
        commit.model,
        file.name,
        repo_type=str(commit.kind),
        revision=commit.commit,
        endpoint=commit.access.endpoint,
    )


def _hash_kind(content_hash: str | None) -> str:
    return "git sha1" if content_hash and _GIT_SHA1.fullmatch(content_hash) else "sha256"


def _is_hash(text: str | None) -> bool:
    return text is not None and bool(_SHA256.fullmatch(text) or _GIT_SHA1.fullmatch(text))

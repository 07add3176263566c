"""S3Folder: a folder in a bucket, by fsspec's s3fs; failures of S3 as errors for the user.

Credentials, region and endpoint are those of the environment (`AWS_PROFILE`, `AWS_ENDPOINT_URL_S3`, …), as for the
AWS command line. A machine without credentials reads public buckets.

s3fs turns answers of S3 into Python's errors (PermissionError, FileNotFoundError). What botocore and aiohttp raise
before there is an answer comes as it is; their classes are known by name, because they may not be installed.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from minimax_tools.errors import CheckpointError, MissingExtraError, NetworkLossError, RemoteError, list_names
from minimax_tools.machine.files import digest_file
from minimax_tools.machine.size import format_size
from minimax_tools.remote.address import RemoteAddress, RemoteFile, RemoteFolder, stays_inside
from minimax_tools.remote.cache import CACHE_VARIABLE, MODELS, RemoteCache, check_room, locked_file, mark_used

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_MAX_FOUND_LENGTH = 300
_LIBRARIES = frozenset({"botocore", "aiobotocore", "aiohttp", "fsspec", "urllib3"})
_WITHOUT_CREDENTIALS = frozenset(
    {
        *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
        *("ProfileNotFound", "TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError"),
    }
)
_WRONG_CHECKSUM = frozenset({"FlexibleChecksumError", "ChecksumError"})
_TOO_MANY_REQUESTS = 429
# s3fs' numbers of the answers 500 and 503: the server fails for now, or has too much to do.
_SERVER_FAILURES = (errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EIO))
# Of a file, the bytes in one request, and the requests at once.
_RANGE_BYTES = 8 << 20
_NUM_RANGES = 8
# Key of an object's metadata with the sha256 of its content; S3 itself knows none of an object put in several parts.
_SHA256_KEY = "mm2-sha256"
# In seconds. The variable AWS_MAX_ATTEMPTS sets the number of attempts.
_PATIENCE = {"connect_timeout": 10, "read_timeout": 60}
_MAX_NAMED = 6


@dataclass(kw_only=True)
class S3Folder(RemoteFolder):
    """A folder in a bucket of S3."""

    address: RemoteAddress
    range_bytes: int = _RANGE_BYTES
    _opened: Any = None
    _is_anonymous: bool = False
    _lock: Any = field(default_factory=threading.Lock)

    def files(self) -> Mapping[str, RemoteFile]:
        prefix = self._key("")
        listed = self._request(lambda system: system.find(prefix, detail=True), name="")
        found = {path.removeprefix(prefix).lstrip("/"): record for path, record in listed.items()}
        return {
            name: RemoteFile(name=name, size_bytes=int(record["size"]), tag=_tag(record))
            for name, record in sorted(found.items())
            if stays_inside(name)
        }

    def find(self, name: str) -> RemoteFile | None:
        head = self._head(name)
        if head is None:
            return None
        return RemoteFile(name=name, size_bytes=int(head["ContentLength"]), tag=_tag(head))

    def fetch(self, file: RemoteFile, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_room(path.parent, file.size_bytes, what=f"{file.name} of {self.address}")
        logger.info("Fetching %s of %s (%s).", file.name, self.address, format_size(file.size_bytes))
        part = path.with_name(f".{path.name}.part")
        try:
            with part.open("wb") as output:
                for start in range(0, file.size_bytes, self.range_bytes * _NUM_RANGES):
                    output.writelines(self._read_ranges(file, start))
            part.replace(path)
        except OSError as error:
            raise RemoteError(
                f"{file.name} of {self.address} cannot be stored in {path.parent}",
                found=str(error),
                next_step=f"Mend the disk or its permissions, or set {CACHE_VARIABLE} to another folder.",
            ) from error

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` of a file, `stop` not included."""
        (piece,) = self._cat(file, [(start, stop)]) if start < stop else (b"",)
        return piece

    def forget(self, file: RemoteFile, path: Path) -> None:
        path.unlink(missing_ok=True)

    def check_place(self) -> None:
        bucket = self.address.repository
        # A request for reading would be sent as anybody where there are no credentials.
        self._request(lambda system: system.call_s3("head_bucket", Bucket=bucket), name="", verb="written to")

    def put(self, files: Mapping[str, Path], *, last: str) -> tuple[str, ...]:
        digests = {name: digest_file(path) for name, path in files.items()}
        absent = [name for name in files if not self._holds(name, files[name], digests[name])]
        # Alone it is replaced in one step. Not asked for where there is nothing to remove: a publisher may lack the
        # right to delete.
        if last in absent and absent != [last] and self._head(last) is not None:
            bucket, key = self.address.repository, self.address.join(last)
            self._request(
                lambda system: system.call_s3("delete_object", Bucket=bucket, Key=key),
                name=last,
                verb="removed",
            )
        for name in sorted(absent, key=lambda name: (name == last, name)):
            if name == last:
                # Another process may have put others of their names meanwhile.
                lost = [
                    one for one in files if one != last and not self._holds(one, files[one], digests[one])
                ]
                if lost:
                    raise RemoteError(
                        f"another process puts files at {self.address} at the same time",
                        found=f"another content of {list_names(lost, most=_MAX_NAMED)}",
                        next_step="Choose another address, or run again when it has ended.",
                    )
            logger.info("Putting %s (%s) at %s.", name, format_size(files[name].stat().st_size), self.address)
            self._put_file(name, files[name], digests[name])
        return tuple(absent)

    def _read_ranges(self, file: RemoteFile, start: int) -> list[bytes]:
        """Read the next batch of ranges, all at once."""
        stop = min(start + self.range_bytes * _NUM_RANGES, file.size_bytes)
        starts = range(start, stop, self.range_bytes)
        return self._cat(file, [(one, min(one + self.range_bytes, stop)) for one in starts])

    def _cat(self, file: RemoteFile, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Read ranges of a file, each from a start to a stop; a piece has the length that was asked for."""
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        path = self._key(file.name)

        def ask(system: Any) -> list[bytes]:
            pieces: list[bytes | Exception] = system.cat_ranges([path] * len(starts), starts, stops)
            for piece in pieces:
                # Raised here: older versions of fsspec return errors among the pieces, whatever they are asked.
                if isinstance(piece, Exception):
                    raise piece
            return cast("list[bytes]", pieces)

        pieces = self._request(ask, name=file.name)
        if any(len(piece) != stop - start for piece, (start, stop) in zip(pieces, ranges, strict=True)):
            raise RemoteError(
                f"{file.name} of {self.address} is no longer as long as it was",
                expected=f"{file.size_bytes} bytes",
                next_step="It was replaced while it was fetched: run again.",
            )
        return pieces

    def _holds(self, name: str, path: Path, sha256: str) -> bool:
        head = self._head(name)
        if head is None or int(head["ContentLength"]) != path.stat().st_size:
            return False
        return bool(head.get("Metadata", {}).get(_SHA256_KEY) == sha256)

    def _head(self, name: str) -> Mapping[str, Any] | None:
        """Return S3's record of a file; None if there is none in an existing bucket."""
        bucket, key = self.address.repository, self.address.join(name)

        def ask(system: Any) -> Any:
            try:
                return system.call_s3("head_object", Bucket=bucket, Key=key)
            except FileNotFoundError:
                # S3 says the same of a bucket that does not exist: this request raises then.
                system.call_s3("head_bucket", Bucket=bucket)
                return None

        head: Mapping[str, Any] | None = self._request(ask, name=name)
        return head

    def _put_file(self, name: str, path: Path, sha256: str) -> None:
        self._request(
            lambda system: system.put_file(str(path), self._key(name), Metadata={_SHA256_KEY: sha256}),
            name=name,
            verb="put there",
        )

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self.address.repository, self.address.path, name) if part)

    def _request(self, work: Callable[[Any], Result], *, name: str, verb: str = "fetched") -> Result:
        """Return the result of `work` on the file system; without credentials, of a second try as anybody."""
        system = self._system()
        try:
            try:
                return work(system)
            except Exception as error:
                if not _is_any(error, _WRONG_CHECKSUM):
                    raise
                logger.warning("%s of %s came damaged: fetching it once more.", name, self.address)
                return work(system)
        except Exception as error:
            if not _is_any(error, _WITHOUT_CREDENTIALS) or verb != "fetched":
                raise _translate(error, self.address, name=name, verb=verb) from error
            no_credentials = error
        self._is_anonymous, self._opened = True, None
        try:
            return work(self._system())
        except Exception as error:
            # A bucket that refuses anybody wants credentials: that is the user's news.
            shown = no_credentials if isinstance(error, PermissionError) else error
            raise _translate(shown, self.address, name=name, verb=verb) from error

    def _system(self) -> Any:
        """Return s3fs' file system of this process."""
        with self._lock:
            if self._opened is None:
                self._opened = _open_system(self.address, anon=self._is_anonymous)
            return self._opened


def _translate(error: BaseException, address: RemoteAddress, *, name: str, verb: str) -> RemoteError:
    """Build the error for a request about a file, or a whole folder if `name` is empty, after its last attempt."""
    what = f"{name} of {address}" if name else str(address)
    found = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_FOUND_LENGTH].rstrip(" .")
    reason, next_step = _explain(error, address)
    kind = NetworkLossError if _is_network_loss(error) else RemoteError
    return kind(f"{what} could not be {verb}: {reason}", found=found, next_step=next_step)


def _explain(error: BaseException, address: RemoteAddress) -> tuple[str, str]:
    """Return the reason of a failure, and the user's next step."""
    if _is_any(error, _WITHOUT_CREDENTIALS):
        return (
            "this machine has no credentials of AWS, and the bucket is not public",
            "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role.",
        )
    if isinstance(error, FileNotFoundError):
        return (
            f"there is no bucket {address.repository!r}, or no such file in it",
            "Check the address, and AWS_ENDPOINT_URL_S3 if the bucket is on a server of your own.",
        )
    if isinstance(error, PermissionError):
        return (
            "the credentials are not valid for it, or there is no such file (without s3:ListBucket, S3 says the same)",
            "Check the address and the credentials: aws sts get-caller-identity shows whose they are.",
        )
    if _is_any(error, _WRONG_CHECKSUM):
        return "it came damaged twice", "A proxy may spoil it: try another network."
    if _is_server_failure(error):
        return "S3 fails, or has too much to do", "Run again: whole files are not sent twice."
    return (
        "S3 does not answer, or breaks off",
        "Check the network, AWS_ENDPOINT_URL_S3 and AWS_DEFAULT_REGION, and run again: whole files are not sent twice.",
    )


def _is_network_loss(error: BaseException) -> bool:
    """Decide whether no whole answer came: no connection, a timeout, a failing server, or a body that broke off."""
    if _is_server_failure(error):
        return True
    if isinstance(error, (FileNotFoundError, PermissionError)) or _is_any(
        error, _WITHOUT_CREDENTIALS | _WRONG_CHECKSUM
    ):
        return False
    return any(
        isinstance(cause, (ConnectionError, TimeoutError))
        or type(cause).__module__.split(".")[0] in _LIBRARIES
        for cause in _causes(error)
        # botocore's class of answers: this one came.
        if type(cause).__name__ != "ClientError"
    )


def _is_server_failure(error: BaseException) -> bool:
    is_known = isinstance(error, OSError) and error.errno in _SERVER_FAILURES
    statuses = (_status(cause) for cause in _causes(error))
    return is_known or any(status == _TOO_MANY_REQUESTS or status >= 500 for status in statuses)


def _status(error: BaseException) -> int:
    """Return the status of the answer that botocore's error is of; 0 of other errors."""
    response: Any = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return int(metadata.get("HTTPStatusCode", 0))


def _is_any(error: BaseException, names: frozenset[str]) -> bool:
    """Decide whether an error or one of its causes is of a class of these names."""
    return any(type(cause).__name__ in names for cause in _causes(error))


def _causes(error: BaseException) -> tuple[BaseException, ...]:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    return tuple(causes)


def _open_system(address: RemoteAddress, *, anon: bool) -> Any:
    try:
        import s3fs
    except ImportError as error:
        raise MissingExtraError("s3fs", extra="remote", needed_for=str(address)) from error
    from aiobotocore.session import AioSession

    session = AioSession()
    session.register_component("data_loader", _service_loader())
    # Nothing is remembered of what was there: another process may publish meanwhile.
    return s3fs.S3FileSystem(
        anon=anon,
        session=session,
        config_kwargs=dict(_PATIENCE),
        use_listings_cache=False,
        skip_instance_cache=True,
    )


@cache
def _service_loader() -> Any:
    """Return botocore's loader of the services' descriptions, for all folders: it parses them once, in 0.3 s."""
    from aiobotocore.session import AioSession

    return AioSession().get_component("data_loader")


def _tag(record: Mapping[str, Any]) -> str:
    return "".join(letter for letter in str(record.get("ETag", "")) if letter.isalnum() or letter == "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoint:
    """A checkpoint in a folder of S3 as it was listed; another version of its files has another `folder`."""

    source: S3Folder
    files: Mapping[str, RemoteFile]  # by name
    folder: Path  # folder of the files that are here, under their names

    @classmethod
    def open(cls, source: S3Folder) -> RemoteCheckpoint:
        """List the files at an address; raise CheckpointError if there are none."""
        files = source.files()
        if not files:
            raise CheckpointError(
                f"no checkpoint at {source.address}", found="nothing", next_step="Check the address."
            )
        version = json.dumps([[file.name, file.size_bytes, file.tag] for file in files.values()])
        folder = RemoteCache.from_environment().place(MODELS, source.address, version)
        return cls(source=source, files=files, folder=folder)

    @property
    def name(self) -> str:
        """The address."""
        return str(self.source.address)

    @property
    def is_listed(self) -> bool:
        """True: a bucket is always asked."""
        return True

    def holds(self, name: str) -> bool:
        """Decide whether a file is here."""
        return (self.folder / name).exists()

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` of a file, `stop` not included."""
        return self.source.read(self.files[name], start, stop)

    def lacking(self, missing: Sequence[str]) -> CheckpointError:
        """Build the error for files that the address lacks."""
        return CheckpointError(
            f"{self.name} has no {list_names(list(missing), most=_MAX_NAMED)}",
            found=f"{len(self.files)} other files",
            next_step="Check the address.",
        )

    def fetch(self, names: Iterable[str]) -> dict[str, Path]:
        """Return the paths of files by name; those that are not here are fetched."""
        wanted = sorted(set(names))
        if missing := [name for name in wanted if name not in self.files]:
            raise self.lacking(missing)
        for name in wanted:
            path = self.folder / name
            if not path.exists():
                with locked_file(path):
                    if not path.exists():
                        self.source.fetch(self.files[name], path)
        mark_used(self.folder)
        return {name: self.folder / name for name in wanted}

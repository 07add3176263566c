"""Failures of S3 as errors for the user.

s3fs turns answers of S3 into Python's errors (PermissionError, FileNotFoundError). What botocore and aiohttp raise
before there is an answer comes as it is; these libraries are known by name, because they may not be installed.
"""

from __future__ import annotations

import errno
from typing import Any

from minimax_tools.errors import NetworkLossError, RemoteError
from minimax_tools.remote.address import RemoteAddress

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
_NO_REGION = frozenset({"NoRegionError", "InvalidRegionError"})


def lacks_credentials(error: BaseException) -> bool:
    """Decide whether a request was not sent, because this machine has no credentials for it."""
    return any(type(cause).__name__ in _WITHOUT_CREDENTIALS for cause in _causes(error))


def is_damage(error: BaseException) -> bool:
    """Decide whether the bytes that came are not those of the checksum that S3 sent with them."""
    return any(type(cause).__name__ in _WRONG_CHECKSUM for cause in _causes(error))


def is_network_loss(error: BaseException) -> bool:
    """Decide whether no whole answer came: no connection, a timeout, a failing server, or a body that broke off."""
    if _is_server_failure(error):
        return True
    if (
        isinstance(error, (FileNotFoundError, PermissionError))
        or lacks_credentials(error)
        or is_damage(error)
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
    return is_known or any(
        status == _TOO_MANY_REQUESTS or status >= 500 for status in map(_status, _causes(error))
    )


def _status(error: BaseException) -> int:
    """Return the status of the answer that botocore's error is of; 0 of other errors."""
    response: Any = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return int(metadata.get("HTTPStatusCode", 0))


def translate(
    error: BaseException, address: RemoteAddress, *, name: str, verb: str = "fetched"
) -> RemoteError:
    """Build the error for a request about a file, or a whole folder if `name` is empty, after its last attempt."""
    if isinstance(error, RemoteError):
        return error
    what = f"{name} of {address}" if name else str(address)
    found = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_FOUND_LENGTH].rstrip(" .")
    kept = "received data is kept" if verb == "fetched" else "what is there is not sent twice"
    reason, next_step = _explain(error, address, kept)
    kind = NetworkLossError if is_network_loss(error) else RemoteError
    return kind(f"{what} could not be {verb}: {reason}", found=found, next_step=next_step)


def _explain(error: BaseException, address: RemoteAddress, kept: str) -> tuple[str, str]:
    """Return the reason of a failure, and the user's next step; `kept` says what need not be done twice."""
    if lacks_credentials(error):
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
    if is_damage(error):
        return (
            "it came damaged twice: its bytes are not those of S3's own checksum",
            "A proxy may spoil it: try another network.",
        )
    if any(type(cause).__name__ in _NO_REGION for cause in _causes(error)):
        return "no region is set", "Set AWS_DEFAULT_REGION to the bucket's region."
    if _is_server_failure(error):
        return "S3 fails, or has too much to do", f"Run again: {kept}."
    if is_network_loss(error):
        return (
            "S3 does not answer, or breaks off",
            f"Check the network and AWS_ENDPOINT_URL_S3, and run again: {kept}.",
        )
    return "the answer is not what S3 says", "Check AWS_ENDPOINT_URL_S3 and the proxy, and run again."


def _causes(error: BaseException) -> tuple[BaseException, ...]:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    return tuple(causes)

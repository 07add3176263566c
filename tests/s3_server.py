"""S3Server: moto's server of S3 on this machine, which keeps a log of requests and fails when told to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
import moto.backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Start = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class S3Request:
    """A request, as it came."""

    method: str
    path: str
    range: str
    is_signed: bool


@dataclass(kw_only=True)
class S3Fault:
    """A planted fault: a status in place of the answer, or a body with one byte changed, or one that breaks off."""

    method: str
    part: str  # text in the path
    times: int
    status: int | None = None
    is_corrupt: bool = False
    breaks_off: bool = False


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


@dataclass(kw_only=True)
class S3Server:
    """Serves buckets while its `with` block lasts."""

    port: int = 0
    requests: list[S3Request] = field(default_factory=list)
    faults: list[S3Fault] = field(default_factory=list)
    objects: Any = None  # boto3's client, for what a test does by hand

    def __enter__(self) -> S3Server:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", self.port, self._answer, threaded=True, request_handler=_Quiet
        )
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, method: str, part: str = "") -> list[S3Request]:
        return [one for one in self.requests if one.method == method and part in one.path]

    def fetched(self) -> list[str]:
        """Names of the files that were asked for, each once, in the order of the first request."""
        return list(dict.fromkeys(one.path.rpartition("/")[2] for one in self.asked("GET") if one.range))

    def reset(self, bucket: str) -> None:
        """Begin anew, with one empty bucket."""
        moto.backends.get_backend("s3").reset()
        self.faults.clear()
        client = boto3.client("s3", endpoint_url=self.endpoint)
        client.create_bucket(Bucket=bucket)
        self.objects = client
        self.forget()

    def forget(self) -> None:
        self.requests.clear()

    def plant(self, method: str, part: str, *, times: int = 1, **kind: Any) -> None:
        self.faults.append(S3Fault(method=method, part=part, times=times, **kind))

    def _answer(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append(
            S3Request(
                method=method,
                path=path,
                range=environ.get("HTTP_RANGE", ""),
                is_signed="HTTP_AUTHORIZATION" in environ,
            )
        )
        fault = self._take(method, path)
        if fault is None:
            return self._app(environ, start)
        if fault.status is not None:
            start(f"{fault.status} planted", [("Content-Length", "0")])
            return [b""]
        body = b"".join(self._app(environ, start))
        if fault.breaks_off:
            return _break_off(body)
        middle = len(body) // 2
        return [body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]]

    def _take(self, method: str, path: str) -> S3Fault | None:
        for fault in self.faults:
            if fault.times and fault.method == method and fault.part in path:
                fault.times -= 1
                return fault
        return None


def _break_off(body: bytes) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    raise ConnectionResetError

"""HubServer: a hub on this machine that speaks what huggingface_hub asks, keeps a log, and fails when told to.

Large files (weights) are redirected to the name `localhost`, another host than 127.0.0.1 for an HTTP client, as the
hub does with its content network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_LARGE_SUFFIXES = (".safetensors", ".bin")
# A dataset is kept under its id with `datasets/` before it.
_API = re.compile(r"/api/(?:models/|(?=datasets/))((?:datasets/)?[^/]+/[^/]+)(?:/revision/([^/]+))?")
_RESOLVE = re.compile(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_PREUPLOAD = re.compile(r"/api/(datasets/[^/]+/[^/]+)/preupload/([^/]+)")
_BATCH = re.compile(r"/(datasets/[^/]+/[^/]+)\.git/info/lfs/objects/batch")
_COMMIT = re.compile(r"/api/(datasets/[^/]+/[^/]+)/commit/([^/]+)")
# A client that is reset forgets what it has not read yet.
_BEFORE_RESET_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, and the status of its answer."""

    method: str
    path: str
    range: str | None
    token: str | None
    status: int

    @property
    def file(self) -> str:
        """Name of the file that was asked for."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault of an answer."""

    status: int | None = None  # sent in place of the file
    headers: Mapping[str, str] = field(default_factory=dict)  # sent with the status
    after_bytes: int | None = None  # where the body ends early
    ending: str = "close"  # how it ends: `close` or `reset`
    is_corrupt: bool = False  # one byte of the body is another
    ignores_range: bool = False  # the whole file comes, whatever part was asked for
    pause_s: float = 0.0  # wait before every 64 KiB
    body: bytes | None = None  # sent with status 200 in place of a right one


@dataclass(kw_only=True)
class Model:
    """A repository with one commit."""

    files: dict[str, bytes]
    commit: str
    is_gated: bool = False
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    offers_xet: bool = False


class HubServer:
    """Serves models while its `with` block lasts."""

    good_token = "hf_good"

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}
        self._blobs: dict[str, bytes] = {}
        self.faults: list[tuple[str, str, Fault, int]] = []
        self._lock = threading.Lock()
        self._log: list[Request] = []
        handler = type("Handler", (_Handler,), {"server_hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        """Port of the server."""
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        """The hub's address, as HF_ENDPOINT takes it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> list[Request]:
        """The requests so far."""
        with self._lock:
            return list(self._log)

    def asked(self, method: str, file: str = "") -> list[Request]:
        """List the requests of a method whose path ends so; redirected ones count once, where the file came from."""
        return [
            one for one in self.log if one.method == method and one.path.endswith(file) and one.status != 302
        ]

    def forget(self) -> None:
        """Empty the log."""
        with self._lock:
            self._log.clear()

    def add(self, model: str, files: Mapping[str, bytes] | Path, **properties: Any) -> Model:
        """Serve files, or a folder's; the commit is made from them, and those before can be asked for still."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir()}
        blobs = {self.content_hash(name, files[name]): files[name] for name in sorted(files)}
        digest = hashlib.sha1(json.dumps([sorted(files), *blobs]).encode()).hexdigest()
        served = Model(files=dict(files), commit=digest, **properties)
        self._models |= {model: served, f"{model}@{digest}": served}
        self._blobs |= blobs
        return served

    def plant(self, method: str, path: str, *, times: int = 1, **fault: Any) -> None:
        """Answer so the next `times` that `path` occurs in what is asked; the content network's path too."""
        self.faults.append((method, path, Fault(**fault), times))

    def take_fault(self, method: str, path: str) -> Fault | None:
        """Return the fault of this answer, and count it; None if it is right."""
        with self._lock:
            for place, (planted, part, fault, times) in enumerate(self.faults):
                if planted == method and part in path:
                    self.faults[place] = (planted, part, fault, times - 1)
                    if times <= 1:
                        del self.faults[place]
                    return fault
        return None

    @staticmethod
    def content_hash(name: str, data: bytes) -> str:
        """Return the ETag: sha256 of a large file, git's sha1 of a small one."""
        if name.endswith(_LARGE_SUFFIXES):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def note(self, request: Request) -> None:
        """Add a request to the log."""
        with self._lock:
            self._log.append(request)


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        try:
            fault = self.server_hub.take_fault(self.command, path)
            if fault is not None and fault.status is not None:
                self._send(fault.status, dict(fault.headers), b"planted")
            elif match := re.fullmatch(r"/content/(\w+)/(.+)", path):
                self._send_content(match[1], {}, fault)
            elif match := _API.fullmatch(path):
                self._send_listing(match[1], match[2] or "main", fault)
            elif match := _RESOLVE.fullmatch(path):
                self._send_file(match[1], match[2], match[3], fault)
            elif self.command in ("POST", "PUT"):
                self._take(path)
            else:
                # What huggingface_hub asks on its own account is not logged.
                self.send_error(404)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    # The names are those of http.server.
    do_HEAD = do_GET = do_POST = do_PUT = _answer  # noqa: N815

    def _take(self, path: str) -> None:
        """Take what is uploaded to a dataset: it is made, its files are announced, sent and committed."""
        body = self._read_body()
        hub = self.server_hub
        # What is uploaded goes to an address that is itself a secret.
        if self._token() != HubServer.good_token and not path.startswith("/upload/"):
            self._send(401, {}, b'{"error":"Invalid credentials"}')
        elif path == "/api/repos/create":
            name = json.loads(body)["name"]
            owner = json.loads(body).get("organization") or "owner"
            known = hub._models.setdefault(f"datasets/{owner}/{name}", Model(files={}, commit="0" * 40))
            self._send_json({"url": f"{hub.endpoint}/datasets/{owner}/{name}"}, 409 if known.files else 200)
        elif path == "/api/validate-yaml":
            self._send_json({"errors": [], "warnings": []})
        elif _PREUPLOAD.fullmatch(path):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(_LARGE_SUFFIXES) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._send_json({"files": files})
        elif _BATCH.fullmatch(path):
            objects: list[dict[str, object]] = []
            for wanted in json.loads(body)["objects"]:
                href = f"{hub.endpoint}/upload/{wanted['oid']}"
                actions = {} if wanted["oid"] in hub._blobs else {"actions": {"upload": {"href": href}}}
                objects.append({**wanted, **actions})
            self._send_json({"objects": objects, "transfer": "basic"})
        elif path.startswith("/upload/"):
            digest = hashlib.sha256(body).hexdigest()
            assert path == f"/upload/{digest}"
            hub._blobs[digest] = body
            self._send(200, {}, b"")
        elif match := _COMMIT.fullmatch(path):
            committed = dict(hub._models[match[1]].files)
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    committed[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    committed[value["path"]] = hub._blobs[value["oid"]]
            model = hub.add(match[1], committed)
            self._send_json(
                {"commitOid": model.commit, "commitUrl": f"{hub.endpoint}/{match[1]}/commit/{model.commit}"}
            )
        else:
            self.send_error(404)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send_json(self, record: object, status: int = 200) -> None:
        self._send(status, {"Content-Type": "application/json"}, json.dumps(record).encode())

    def _send_listing(self, name: str, revision: str, fault: Fault | None) -> None:
        model = self._find(name, revision)
        if model is None:
            return
        siblings = []
        for file, data in model.files.items():
            size = model.claimed_sizes.get(file, len(data))
            sibling: dict[str, object] = {"rfilename": file, "size": size}
            if file.endswith(_LARGE_SUFFIXES):
                # The git object of a large file is its pointer: another hash than its content's.
                sibling["blobId"] = hashlib.sha1(b"pointer" + data).hexdigest()
                sibling["lfs"] = {
                    "size": size,
                    "sha256": HubServer.content_hash(file, data),
                    "pointerSize": 134,
                }
            else:
                sibling["blobId"] = HubServer.content_hash(file, data)
            siblings.append(sibling)
        record = {"id": name, "modelId": name, "sha": model.commit, "private": False, "siblings": siblings}
        body = json.dumps(record).encode()
        if fault is not None and fault.body is not None:
            body = fault.body
        self._send(200, {"Content-Type": "application/json"}, body)

    def _send_file(self, name: str, revision: str, file: str, fault: Fault | None) -> None:
        model = self._find(name, revision)
        if model is None:
            return
        if model.is_gated and self._token() != HubServer.good_token:
            message = f"Access to model {name} is restricted."
            self._send(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": message}, b"")
            return
        if file not in model.files:
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": model.commit}, b"")
            return
        data = model.files[file]
        etag = HubServer.content_hash(file, data)
        headers = {"X-Repo-Commit": model.commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if not file.endswith(_LARGE_SUFFIXES):
            self._send_content(etag, headers, fault)
            return
        headers.update({"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{etag}"'})
        if model.offers_xet:
            route = f"{self.server_hub.endpoint}/api/models/{name}/xet-read-token/{model.commit}"
            headers.update({"X-Xet-Hash": etag, "X-Xet-Refresh-Route": route})
        location = f"http://localhost:{self.server_hub.port}/content/{etag}/{file}"
        self._send(302, {**headers, "Location": location}, b"")

    def _send_content(self, etag: str, headers: dict[str, str], fault: Fault | None) -> None:
        data = self.server_hub._blobs[etag]
        fault = fault or Fault()
        if fault.is_corrupt:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status, start, stop = 200, 0, len(data)
        if asked and not fault.ignores_range:
            status, start = 206, int(asked[1])
            if start >= len(data):
                self._send(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
                return
            stop = min(int(asked[2]) + 1, len(data)) if asked[2] else len(data)
            headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        self._send(status, headers, data[start:stop], fault)

    def _send(self, status: int, headers: Mapping[str, str], body: bytes, fault: Fault | None = None) -> None:
        self.server_hub.note(
            Request(
                method=self.command,
                path=unquote(urlsplit(self.path).path),
                range=self.headers.get("Range"),
                token=self._token(),
                status=status,
            )
        )
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        fault = fault or Fault()
        end = len(body) if fault.after_bytes is None else fault.after_bytes
        for start in range(0, end, 1 << 16):
            time.sleep(fault.pause_s)
            self.wfile.write(body[start : min(start + (1 << 16), end)])
        if fault.after_bytes is not None:
            self._break_off(fault.ending)

    def _break_off(self, ending: str) -> None:
        self.wfile.flush()
        self.close_connection = True
        if ending == "reset":
            time.sleep(_BEFORE_RESET_S)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def _find(self, name: str, revision: str) -> Model | None:
        """Return the model at that revision; None after the answer that there is none."""
        models = self.server_hub._models
        model = models.get(f"{name}@{revision}") or models.get(name)
        if model is None:
            self._send(404, {"X-Error-Code": "RepoNotFound"}, b'{"error":"Repository not found"}')
        elif revision not in ("main", "v2", model.commit):
            self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"")
            return None
        return model

    def _token(self) -> str | None:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if kind == "Bearer" else None

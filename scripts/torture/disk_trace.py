"""DiskTrace: what a command did to the files below a folder, call by call, as strace tells it.

safetensors writes without Python, so only the kernel's calls tell everything. Most Linux systems have strace as a
package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_CALLS = (
    *("openat", "creat", "write", "pwrite64", "writev", "copy_file_range", "sendfile", "ftruncate"),
    *(
        "fsync",
        "fdatasync",
        "rename",
        "renameat",
        "renameat2",
        "unlink",
        "unlinkat",
        "mkdir",
        "mkdirat",
        "rmdir",
    ),
)
_LINE = re.compile(r"^(\d+)\s+(\w+)\((.*)\)\s+= (-?\d+)(?:<(.*)>)?")
_UNFINISHED = re.compile(r"^(\d+)\s+(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(\d+)\s+<\.\.\. \w+ resumed>(.*)$")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"^(\d+)<((?:\\x[0-9a-f]{2}|[^<>])*)>")
# Longest piece of data that strace writes down; a longer write is read from the file that is there at the end.
_LONGEST = 1 << 22
_SCRIPTS = Path(__file__).resolve().parents[1]
# Environment of a traced command: sums of several threads differ in their last bits. The command imports `torture`.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{_SCRIPTS.parent}{os.pathsep}{_SCRIPTS}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCall:
    """A call that changed a file or folder, or flushed it."""

    kind: str  # create, write, copy, truncate, sync, rename, remove or mkdir
    path: Path
    target: Path | None = None  # the new name of a rename
    data: bytes = b""
    size: int = 0  # of a truncation
    is_new: bool = False  # whether a file that is opened is emptied or made


def find_missing() -> str | None:
    """Say what is missing to trace commands here; None if nothing is."""
    if shutil.which("strace") is None:
        return "strace is not installed: apt-get install strace"
    done = subprocess.run(["strace", "-f", "true"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"strace cannot trace here: {done.stderr.strip()[-200:]}"


def trace_command(command: Sequence[str], *, below: Path, log: Path) -> tuple[int, list[DiskCall]]:
    """Run a command that names its files by absolute paths; return its exit code and its calls below a folder."""
    words = [
        "strace",
        "-f",
        "-y",
        "-xx",
        "-s",
        str(_LONGEST),
        "-o",
        str(log),
        "-e",
        f"trace={','.join(_CALLS)}",
    ]
    done = subprocess.run(
        [*words, *command],
        env=ONE_THREAD,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    with log.open(encoding="ascii", errors="replace") as lines:
        calls = [call for line in _whole_lines(lines) if (call := _parse(line)) and _is_below(call, below)]
    return done.returncode, calls


def _is_below(call: DiskCall, folder: Path) -> bool:
    return any(path is not None and folder in path.parents for path in (call.path, call.target)) or (
        call.path == folder and call.kind == "sync"
    )


def _whole_lines(lines: Iterator[str]) -> Iterator[str]:
    """Join the two lines of a call during which another thread made one; it counts when it ended."""
    begun: dict[str, str] = {}
    for line in lines:
        line = line.rstrip("\n")
        if match := _UNFINISHED.match(line):
            begun[match[1]] = match[2]
        elif match := _RESUMED.match(line):
            yield f"{match[1]} {begun.pop(match[1], '')}{match[2]}"
        else:
            yield line


def _parse(line: str) -> DiskCall | None:
    match = _LINE.match(line)
    if match is None or int(match[4]) < 0:
        return None
    name, words, result = match[2], match[3], int(match[4])
    texts = [_decode(text) for text in _TEXT.findall(words)]
    opened = _path_of(words)
    if name in ("openat", "creat"):
        is_new = name == "creat" or "O_TRUNC" in words or "O_EXCL" in words
        if "O_CREAT" not in words and not is_new:
            return None
        return DiskCall(kind="create", path=_absolute(words, texts[0]), is_new=is_new)
    if name in ("write", "pwrite64", "writev") and opened is not None:
        data = b"".join(text for text in texts)
        return DiskCall(kind="write" if len(data) == result else "copy", path=opened, data=data)
    if name in ("copy_file_range", "sendfile"):
        places = re.findall(r"\d+<((?:\\x[0-9a-f]{2})*)>", words)
        target = places[-1] if name == "copy_file_range" else places[0]
        return DiskCall(kind="copy", path=Path(os.fsdecode(_decode(target))))
    if name == "ftruncate" and opened is not None:
        return DiskCall(kind="truncate", path=opened, size=int(words.rsplit(",", 1)[1]))
    if name in ("fsync", "fdatasync") and opened is not None:
        return DiskCall(kind="sync", path=opened)
    if name.startswith("rename"):
        return DiskCall(kind="rename", path=Path(os.fsdecode(texts[0])), target=Path(os.fsdecode(texts[1])))
    if name in ("unlink", "unlinkat", "rmdir"):
        return DiskCall(kind="remove", path=_absolute(words, texts[0]))
    if name.startswith("mkdir"):
        return DiskCall(kind="mkdir", path=_absolute(words, texts[0]))
    return None


def _path_of(words: str) -> Path | None:
    match = _DESCRIPTOR.match(words)
    return None if match is None else Path(os.fsdecode(_decode(match[2])))


def _absolute(words: str, text: bytes) -> Path:
    """Return the path of a call that may name a folder's descriptor before it."""
    folder = re.match(r"^(?:AT_FDCWD|\d+)<((?:\\x[0-9a-f]{2})*)>", words)
    path = Path(os.fsdecode(text))
    return path if folder is None else Path(os.fsdecode(_decode(folder[1]))) / path


def _decode(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))

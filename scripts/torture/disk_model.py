"""DiskModel: what a disk may hold after a power loss, at any point of a trace.

| part | after the loss |
|---|---|
| data flushed by fsync of the file | there |
| other data | lost, half of it there, zeros of its length, or that of the file written last alone |
| name flushed by fsync of its folder | there |
| other names | made, not made, or only the last of them |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torture.disk_trace import DiskCall

_NAMING = ("create", "mkdir", "rename", "remove")
# How unflushed data come out, and which unflushed names are there.
_VARIANTS = (
    ("lost", "all"),
    ("half", "all"),
    ("zeros", "all"),
    ("lost", "none"),
    ("half", "last"),
    ("whole", "all"),
    ("last", "all"),
)
Names = dict[Path, "_File | None"]  # None for a folder


@dataclass(slots=True, eq=False)
class _File:
    content: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""
    position: int = 0  # where the next write goes

    def after_loss(self, data: str) -> bytes:
        if self.flushed == self.content or data == "lost":
            return self.flushed
        if data == "half":
            return bytes(self.content[: len(self.content) // 2])
        return bytes(len(self.content)) if data == "zeros" else bytes(self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPower:
    """The files and folders on the disk after a power loss; None for a folder."""

    after: int  # number of calls before it
    variant: str
    contents: dict[Path, bytes | None]


def losses(calls: Sequence[DiskCall], *, final: Path) -> Iterator[LostPower]:
    """Yield what the disk may hold after each call, each state once. `final` is the folder as it is at the end."""
    seen: set[int] = set()
    model = _Model(_copied_contents(calls, final))
    for number, call in enumerate(calls, start=1):
        model.apply(call)
        for data, names in _VARIANTS:
            contents = model.after_loss(data, names)
            state = hash(frozenset(contents.items()))
            if state not in seen:
                seen.add(state)
                yield LostPower(after=number, variant=f"data {data}, names {names}", contents=contents)


class _Model:
    def __init__(self, copied: dict[int, bytes]) -> None:
        self._names: Names = {}
        self._flushed_names: Names = {}
        self._pending: list[tuple[DiskCall, _File | None]] = []
        self._copied = copied
        self._num_files = 0
        self._last_written: _File | None = None
        self._numbers: dict[int, int] = {}

    def apply(self, call: DiskCall) -> None:
        file = self._names.get(call.path)
        if call.kind in _NAMING:
            named = file
            if call.kind == "create":
                if file is not None:
                    if call.is_new:
                        file.content.clear()
                    file.position = 0
                    return
                named = _File()
                self._numbers[id(named)] = self._num_files
                self._num_files += 1
            _rename(self._names, call, named)
            self._pending.append((call, named))
        elif file is not None and call.kind == "write":
            self._last_written = file
            file.content[file.position : file.position + len(call.data)] = call.data
            file.position += len(call.data)
        elif file is not None and call.kind == "truncate":
            del file.content[call.size :]
            file.content.extend(bytes(call.size - len(file.content)))
        elif file is not None and call.kind == "copy":
            file.content[:] = self._copied.get(self._numbers[id(file)], b"?")
        elif call.kind == "sync" and file is not None:
            file.flushed = bytes(file.content)
        elif call.kind == "sync":
            self._flush_names(call.path)

    def after_loss(self, data: str, names: str) -> dict[Path, bytes | None]:
        there = self._names if names == "all" else dict(self._flushed_names)
        if names == "last" and self._pending:
            _rename(there, *self._pending[-1])
        return {
            path: None if file is None else file.after_loss(self._fate(file) if data == "last" else data)
            for path, file in there.items()
            # A file whose folder's name was lost cannot be reached.
            if all(parent in there for parent in path.parents if parent in self._names)
        }

    def _fate(self, file: _File) -> str:
        return "whole" if file is self._last_written else "lost"

    def _flush_names(self, folder: Path) -> None:
        waiting = []
        for call, named in self._pending:
            if (call.target or call.path).parent == folder:
                _rename(self._flushed_names, call, named)
            else:
                waiting.append((call, named))
        self._pending = waiting


def _rename(names: Names, call: DiskCall, named: _File | None) -> None:
    """Make, rename or remove a name; of a folder, with those names below it that are known. `named` has the name."""
    if call.kind in ("create", "mkdir"):
        names[call.path] = named
    elif call.kind == "remove":
        names.pop(call.path, None)
    elif call.target is not None:
        for path in [path for path in names if path == call.target or call.target in path.parents]:
            del names[path]
        for path in [path for path in names if path == call.path or call.path in path.parents]:
            names[call.target / path.relative_to(call.path)] = names.pop(path)
        # The name may be on the disk without the former one.
        names[call.target] = named


def _copied_contents(calls: Sequence[DiskCall], final: Path) -> dict[int, bytes]:
    """Return the contents of files into which the kernel copied bytes, by the number of the file's creation."""
    names: dict[Path, int] = {}
    num_files, copied = 0, set()
    for call in calls:
        if call.kind == "create" and call.path not in names:
            names[call.path] = num_files
            num_files += 1
        elif call.kind == "copy" and call.path in names:
            copied.add(names[call.path])
        elif call.kind == "remove":
            names.pop(call.path, None)
        elif call.kind == "rename" and call.target is not None:
            for path in [path for path in names if path == call.path or call.path in path.parents]:
                names[call.target / path.relative_to(call.path)] = names.pop(path)
    return {
        number: path.read_bytes()
        for path, number in names.items()
        if number in copied and path.is_file() and final in path.parents
    }

"""OpenFiles: the safetensors files of a directory that were read last, kept open for the next tensor."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import safetensors.torch
import torch
from safetensors import safe_open

# A layer has three files (sites, twins, floor), the model outside its layers too, and the inputs have one.
_MOST_OPEN = 8
# A tensor of a mapped file is copied up to this size, which is cheaper than to map the file again for it.
_SMALL_BYTES = 2**20
# A file of up to this size is read whole: a floor has hundreds of tensors, and each costs more to ask for than to read.
_SMALL_FILE_BYTES = 2**22


FileState: TypeAlias = "tuple[int, int, int]"


def file_state(path: Path | str) -> FileState:
    """Return the state of a file, which changes when it is replaced or written: inode, time in ns, size in bytes.

    Raises:
        OSError: There is no such file.
    """
    status = os.stat(path)  # noqa: PTH116 - twice as fast, and asked before each tensor
    return status.st_ino, status.st_mtime_ns, status.st_size


class OpenFiles:
    """The safetensors files read last from a directory, each kept open until it is replaced.

    Args:
        directory: Folder of the files.
        hold: Called with a file's name before it is read: a mirror fetches the file then.
    """

    def __init__(self, directory: Path, *, hold: Callable[[str], None] | None = None) -> None:
        self._directory = directory
        self._hold = hold
        # By file name, the one read last at the end.
        self._opened: OrderedDict[str, _OpenFile] = OrderedDict()

    def read(self, file: str, name: str) -> torch.Tensor | None:
        """Read a tensor that no other reader shares; None if the file holds none of that name.

        Raises:
            OSError: There is no such file, or it cannot be read.
            SafetensorError: It is damaged.
        """
        if self._hold is not None:
            self._hold(file)
        path = self._path_of(file)
        opened = self._open(path, file)
        if name not in opened.names:
            return None
        tensor = opened.read(name)
        # Two reads from one open file share memory, which a caller may change.
        if not opened.is_mapped or tensor.nbytes <= _SMALL_BYTES:
            return tensor.clone()
        mapping: Any = safe_open(path, framework="pt")
        large: torch.Tensor = mapping.get_tensor(name)
        return large

    def state(self, file: str) -> FileState:
        """Return the state in which a file was read last; the present one if it is not open.

        Raises:
            OSError: There is no such file.
        """
        opened = self._opened.get(file)
        return file_state(self._path_of(file)) if opened is None else opened.state

    def _path_of(self, file: str) -> str:
        # As text: one is built for each tensor, and `Path` takes several times as long.
        return f"{self._directory}/{file}"

    def _open(self, path: str, file: str) -> _OpenFile:
        """Return the file as it is now, and close the one that was read longest ago if there are too many."""
        state = file_state(path)
        opened = self._opened.pop(file, None)
        if opened is None or opened.state != state:
            opened = _OpenFile.of(path, state)
        self._opened[file] = opened
        if len(self._opened) > _MOST_OPEN:
            self._opened.popitem(last=False)
        return opened


class _OpenFile(NamedTuple):
    state: FileState
    names: frozenset[str]
    read: Callable[[str], torch.Tensor]
    is_mapped: bool  # False for a file that was read whole

    @classmethod
    def of(cls, path: str, state: FileState) -> _OpenFile:
        if state[-1] <= _SMALL_FILE_BYTES:
            # `load` knows fewer dtypes than `safe_open`.
            with suppress(KeyError):
                tensors = safetensors.torch.load(Path(path).read_bytes())
                return cls(state, frozenset(tensors), tensors.__getitem__, is_mapped=False)
        opened: Any = safe_open(path, framework="pt")  # it has no public type
        return cls(state, frozenset(opened.keys()), opened.get_tensor, is_mapped=True)

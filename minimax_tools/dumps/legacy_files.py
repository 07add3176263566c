"""LegacyFiles: a folder of `.pt` files, one in memory at a time, and where in them tensors lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minimax_tools.dumps.tensor_file import load_restricted
from minimax_tools.errors import CaptureError

# A tensor lies at most so deep: in a tuple under a key of a dict, with one to spare.
_MAX_NESTING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyPlace:
    """Where a tensor lies: a file of the folder, and the keys it may have there, the likeliest first."""

    file: str
    keys: tuple[str, ...]


class LegacyFiles:
    """The `.pt` files of one folder; the last one read is kept."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names = file_names(directory)
        self._loaded: tuple[str, Any] | None = None

    def load(self, name: str) -> Any:
        """What the file holds, as `load_restricted` gives it.

        Raises:
            CaptureError: The file is missing or damaged.
        """
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None  # before the next is read, so that memory holds one
            self._loaded = name, load_restricted(self.directory / name)
        return self._loaded[1]

    def read(self, place: LegacyPlace) -> torch.Tensor:
        """The tensor at `place`, as it was saved.

        Raises:
            CaptureError: The file is damaged, or holds no tensor there.
        """
        value = self.load(place.file)
        tensor = tensor_in(value, place.keys)
        if tensor is None:
            raise CaptureError(
                f"{self.directory / place.file} holds no tensor where one is looked for",
                expected="a tensor, a tuple that begins with it, or a dict with " + ", ".join(place.keys),
                found=described(value),
                next_step="Run the capture again.",
            )
        return tensor


def file_names(directory: Path) -> tuple[str, ...]:
    """Names of the files in a folder, sorted; none where it cannot be read."""
    try:
        return tuple(sorted(path.name for path in directory.iterdir() if path.is_file()))
    except OSError:
        return ()


def first_of(record: Mapping[Any, Any], keys: tuple[str, ...]) -> Any:
    """The first value under one of `keys` that is not None."""
    return next((record[key] for key in keys if record.get(key) is not None), None)


def tensor_in(value: Any, keys: tuple[str, ...]) -> torch.Tensor | None:
    """The tensor that `value` is, begins with, or holds under one of `keys`."""
    for _ in range(_MAX_NESTING):
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, np.ndarray):
            return torch.as_tensor(value)
        if isinstance(value, tuple | list) and value:
            value = value[0]
        elif isinstance(value, Mapping):
            found = first_of(value, keys)
            value = _only_tensor(value) if found is None else found
        else:
            return None
    return None


def described(value: Any) -> str:
    """A few words for what a file holds, for messages."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{tuple(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping):
        return "a dict with " + (", ".join(str(key) for key in list(value)[:8]) or "nothing")
    return type(value).__name__


def _only_tensor(record: Mapping[Any, Any]) -> torch.Tensor | None:
    """The dict's one tensor under a key that is not an input's."""
    tensors = [
        value
        for key, value in record.items()
        if isinstance(value, torch.Tensor) and not str(key).startswith("input")
    ]
    return tensors[0] if len(tensors) == 1 else None

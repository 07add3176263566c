"""PyTorch's `.bin` files: their tensors by name, shape, dtype and place.

Opening one maps it and reads no tensor; nothing in it is called (see `torch_file`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.errors import CheckpointError
from minimax_tools.stored_dtype import StoredDtype
from minimax_tools.torch_file import (
    InertRecord,
    TorchFile,
    is_plain,
    refusing,
    without_gradient,
    word_kind,
)

# Keys under which training scripts keep the weights, beside optimizer state and counters.
_NESTED_KEYS = ("state_dict", "model_state_dict", "model", "module")
_NUM_KEYS_SHOWN = 8

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledEntry(TensorEntry):
    """A tensor of a `.bin` file; `offset` is that of its first element."""

    tensor: torch.Tensor = field(repr=False, compare=False)  # its values, mapped
    file_size_bytes: int  # size of the file when it was mapped
    crc32: int | None  # checksum of its storage; None if it is only a part of that, or the file has none

    @property
    def is_pickled(self) -> bool:
        """True if the file is one that torch.save wrote."""
        return True

    @property
    def is_verbatim(self) -> bool:
        """True if the values are the bytes in the file, in their order: contiguous, and nothing to be computed."""
        return self.tensor.is_contiguous() and not self.tensor.is_conj() and not self.tensor.is_neg()

    @property
    def repeats_elements(self) -> bool:
        """True if the tensor has more bytes than its storage, as an expanded tensor has."""
        return self.size_bytes > self.tensor.untyped_storage().nbytes()

    def narrow_rows(self, start: int, num_rows: int) -> PickledEntry:
        """Return neighbouring rows as a stored tensor of their own; a view's rows may lie apart in the file."""
        rows = self.tensor.narrow(0, start, num_rows)
        return replace(
            self,
            shape=tuple(rows.shape),
            offset=self.offset + start * rows.stride(0) * rows.itemsize,
            tensor=rows,
            crc32=None,
        )

    @property
    def elements(self) -> tuple[object, ...]:
        """Key of the values: equal for names that stand for the same elements, as tied weights do."""
        tensor = self.tensor
        return *self.position, tensor.dtype, self.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def read_pickled_header(path: Path) -> tuple[PickledEntry, ...]:
    """Read the tensors of the state dict in one `.bin`, `.pt` or `.pth` file, in the order of their data.

    The state dict is the file's value itself, or lies in it under one of `_NESTED_KEYS`. Other values (versions,
    counters, optimizer state) are left out, and logged.

    Raises:
        CheckpointError: The file is missing, damaged or not written by torch.save. Or it does not hold exactly one
            state dict, or tensors in it cannot be read (sparse, quantised, without data).
    """
    with refusing(path, CheckpointError, next_step="Fetch the file again."):
        file = TorchFile(path)
    state_dict, left_out = _find_state_dict(path, file.value)
    left_out += [_word_key(key) for key, item in state_dict.items() if not isinstance(item, torch.Tensor)]
    tensors = {name: item for name, item in state_dict.items() if isinstance(item, torch.Tensor)}
    with refusing(path, CheckpointError, next_step="Fetch the file again."):
        entries = _make_entries(path, file, tensors)
    if left_out:
        _logger.info("%s: left out, as they are not tensors of its state dict: %s", path, ", ".join(left_out))
    return tuple(sorted(entries, key=lambda entry: (entry.offset, entry.name)))


def _find_state_dict(path: Path, value: Any) -> tuple[Mapping[Any, Any], list[str]]:
    """Find the mapping that holds the weights, and list the keys beside it."""
    if isinstance(value, InertRecord):
        raise _no_state_dict(path, f"an object of {value.kind}")
    if not isinstance(value, Mapping):
        raise _no_state_dict(path, "a single tensor" if isinstance(value, torch.Tensor) else word_kind(value))
    is_state_dict = _holds_tensors(value)
    # Keys under which a state dict lies inside `value`.
    nested_keys = [key for key in _NESTED_KEYS if _holds_tensors(value.get(key))]
    if len(nested_keys) > 1 or (nested_keys and is_state_dict):
        places = ", ".join(nested_keys) + (", and beside them" if is_state_dict else "")
        raise _no_state_dict(path, f"tensors in several places: {places}")
    if is_state_dict:
        return value, []
    if nested_keys:
        return value[nested_keys[0]], [_word_key(key) for key in value if key != nested_keys[0]]
    keys = ", ".join(_word_key(key) for key in list(value)[:_NUM_KEYS_SHOWN])
    raise _no_state_dict(path, f"a dict with {keys or 'nothing'}")


def _word_key(key: Any) -> str:
    if isinstance(key, str):
        return key
    word = str(key) if isinstance(key, int | float | type(None)) else f"a {word_kind(key)}"
    return f"{word} (a key that is not text)"


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(item, torch.Tensor) for item in value.values())


def _make_entries(path: Path, file: TorchFile, tensors: Mapping[Any, torch.Tensor]) -> list[PickledEntry]:
    entries, faults = [], []
    for name, tensor in tensors.items():
        entry = _make_entry(path, file, name, tensor)
        if isinstance(entry, str):
            faults.append(entry)
        else:
            entries.append(entry)
    if faults:
        raise CheckpointError(
            f"{path} holds tensors that mm2 cannot read",
            expected="dense tensors with data under names",
            found=", ".join(faults[:_NUM_KEYS_SHOWN]),
            next_step="Load it with the tool that wrote it, and save it as safetensors.",
        )
    return entries


def _make_entry(path: Path, file: TorchFile, name: Any, tensor: torch.Tensor) -> PickledEntry | str:
    """Return the entry of a tensor, or what is wrong with it."""
    if not isinstance(name, str):
        return _word_key(name)
    if not is_plain(tensor):
        return f"{name} ({'without data' if tensor.is_meta else 'sparse, nested or quantised'})"
    storage_bytes = tensor.untyped_storage().nbytes()
    place = file.find_storage(tensor) if storage_bytes else None
    if place is None and storage_bytes:
        # Old XLA tensors were saved as numpy arrays.
        return f"{name} (inside the pickle)"
    start, record = (0, None) if place is None else place
    return PickledEntry(
        name=name,
        file=path,
        dtype=StoredDtype.of(tensor.dtype),
        shape=tuple(tensor.shape),
        offset=start + int(tensor.storage_offset()) * tensor.itemsize,
        tensor=without_gradient(tensor),
        file_size_bytes=file.size_bytes,
        # torch writes zero when it leaves the checksum out.
        crc32=record.CRC or None if record is not None and tensor.nbytes == storage_bytes else None,
    )


def _no_state_dict(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds no state dict that mm2 recognises",
        expected="a dict of tensors by name, alone or under " + ", ".join(_NESTED_KEYS),
        found=found,
        next_step="Save the model's state_dict() by itself, best as safetensors.",
    )

"""Headers and indexes of PyTorch's `.bin` files: tensors by name, shape, dtype and place; nothing in a file is called.

Such a file is a pickle. A tensor in it is read as a `StoredTensor`, an object of an unknown class as an `InertRecord`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from minimax_tools.checkpoint.header import TensorEntry, read_header
from minimax_tools.checkpoint.index import TensorIndex, read_headers
from minimax_tools.checkpoint.weight_files import (
    SAFETENSORS_SUFFIX,
    WeightFiles,
    faulty_checkpoint,
    find_index_faults,
    read_index_json,
)
from minimax_tools.errors import CheckpointError
from minimax_tools.stored_dtype import StoredDtype
from minimax_tools.torch_files.inert import InertRecord, word_kind
from minimax_tools.torch_files.stored import StoredTensor
from minimax_tools.torch_files.torch_file import read_structure, refusing

PICKLED_SUFFIXES = (".bin", ".pt", ".pth")

# Keys under which training scripts keep the weights, beside optimizer state and counters.
_NESTED_KEYS = ("state_dict", "model_state_dict", "model", "module")
_NUM_KEYS_SHOWN = 8

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledEntry(TensorEntry):
    """A tensor of a `.bin` file; `offset` is that of its first element, `size_bytes` the size of its values."""

    stored: StoredTensor  # place of the elements in the file, and the computation of the values from them

    @property
    def is_pickled(self) -> bool:
        """True if the file is one that torch.save wrote."""
        return True

    def narrow_rows(self, start: int, num_rows: int) -> PickledEntry:
        """Return neighbouring rows as a stored tensor of their own; a view's rows may lie apart in the file."""
        stored = self.stored.narrow(0, start, num_rows)
        size_bytes = math.prod(stored.shape) * self.dtype.itemsize
        return replace(self, shape=stored.shape, offset=stored.offset, size_bytes=size_bytes, stored=stored)


def read_shard_header(path: Path) -> tuple[TensorEntry, ...]:
    """Read the tensors of one file of a checkpoint, safetensors or PyTorch's, in the order of their data.

    Raises:
        CheckpointError: The file is of neither format, missing or damaged (see `read_header` and
            `read_pickled_header`).
    """
    if path.suffix == SAFETENSORS_SUFFIX:
        return read_header(path)
    if path.suffix in PICKLED_SUFFIXES:
        return read_pickled_header(path)
    raise CheckpointError(
        f"{path} is not a shard that mm2 can read",
        expected=", ".join((SAFETENSORS_SUFFIX, *PICKLED_SUFFIXES)),
        found=path.suffix or "no suffix",
        next_step="Give a file of the checkpoint's index.",
    )


def read_pickled_header(path: Path) -> tuple[PickledEntry, ...]:
    """Read the tensors of the state dict in one `.bin`, `.pt` or `.pth` file, in the order of their data.

    The state dict is the file's value itself, or lies in it under `state_dict`, `model_state_dict`, `model`
    or `module`. Other values (versions, counters, optimizer state) are left out, and logged.

    Raises:
        CheckpointError: The file is missing, damaged or not written by torch.save. Or it does not hold exactly one
            state dict, or tensors in it cannot be read (sparse, quantised, without data).
    """
    with refusing(path, CheckpointError, next_step="Fetch the file again."):
        value = read_structure(path)
    state_dict, left_out = _find_state_dict(path, value)
    _refuse_unreadable(path, state_dict)
    entries = []
    for name, stored in state_dict.items():
        if isinstance(stored, StoredTensor):
            entries.append(_entry(path, name, stored))
        else:
            left_out.append(str(name))
    if left_out:
        _logger.info("%s: left out, as they are not tensors of its state dict: %s", path, ", ".join(left_out))
    return tuple(sorted(entries, key=lambda entry: (entry.offset, entry.name)))


def read_pickled_index(path: Path, *, may_lack_shards: bool = False) -> TensorIndex:
    """Read the index of a `.bin` file, or of the folder whose `.bin` files belong to one checkpoint.

    Args:
        path: The file or the folder.
        may_lack_shards: True if shards that the index file names may be missing; the index then lists their tensors
            as `absent`.

    Raises:
        CheckpointError: As for `read_pickled_header`. Or a shard is missing or damaged, a tensor lies in two files,
            or the index file and the files contradict each other: the message lists all faults.
    """
    if path.is_file():
        return TensorIndex.of(path.parent, read_pickled_header(path))
    names = [file.name for file in path.iterdir()] if path.is_dir() else []
    files = WeightFiles.pickled_among(names)
    if files is None:
        raise CheckpointError(
            f"no checkpoint at {path}",
            expected="pytorch_model.bin, or pytorch_model-*-of-*.bin",
            found="none in the folder" if path.is_dir() else "no such folder",
            next_step="Give the folder of a checkpoint, or a .bin file.",
        )
    weight_map = None if files.index_file is None else read_index_json(path / files.index_file)["weight_map"]
    shards = files.shards if weight_map is None else tuple(sorted(set(weight_map.values())))
    missing = {shard for shard in shards if may_lack_shards and not (path / shard).is_file()}
    present = [shard for shard in shards if shard not in missing]
    headers, faults = read_headers(path, present, read_pickled_header)
    if weight_map is not None:
        faults += find_index_faults(weight_map, headers)
    if faults:
        raise faulty_checkpoint(path, faults)
    absent = {name: file for name, file in (weight_map or {}).items() if file in missing}
    return TensorIndex.of(path, chain.from_iterable(headers.values()), absent)


def _find_state_dict(path: Path, value: Any) -> tuple[Mapping[Any, Any], list[str]]:
    """Find the mapping that holds the weights, and list the keys beside it."""
    if isinstance(value, InertRecord):
        raise _no_state_dict(path, f"an object of {value.module}.{value.name}")
    if not isinstance(value, Mapping):
        raise _no_state_dict(path, "a single tensor" if isinstance(value, StoredTensor) else word_kind(value))
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
    return isinstance(value, Mapping) and any(_is_tensor(item) for item in value.values())


def _is_tensor(value: Any) -> bool:
    """Decide whether a value was a tensor when it was saved, perhaps of a kind that cannot be read."""
    if isinstance(value, InertRecord):
        return value.module in ("torch._utils", "torch._tensor") and value.name.startswith("_rebuild")
    return isinstance(value, StoredTensor | torch.Tensor)


def _refuse_unreadable(path: Path, tensors: Mapping[Any, Any]) -> None:
    faults = []
    for name, value in tensors.items():
        if isinstance(value, InertRecord) and _is_tensor(value):
            faults.append(f"{_word_key(name)} ({value.name})")
        elif isinstance(value, torch.Tensor):
            # Old XLA tensors were saved as numpy arrays, which lie in the pickle itself.
            faults.append(f"{_word_key(name)} (inside the pickle)")
        elif isinstance(value, StoredTensor) and not isinstance(name, str):
            faults.append(_word_key(name))
    if faults:
        raise CheckpointError(
            f"{path} holds tensors that mm2 cannot read",
            expected="dense tensors with data under names",
            found=", ".join(faults[:_NUM_KEYS_SHOWN]),
            next_step="Load it with the tool that wrote it, and save it as safetensors.",
        )


def _entry(path: Path, name: str, stored: StoredTensor) -> PickledEntry:
    return PickledEntry(
        name=name,
        file=path,
        dtype=StoredDtype.of(stored.given_dtype),
        shape=stored.shape,
        offset=stored.offset,
        size_bytes=math.prod(stored.shape) * stored.given_dtype.itemsize,
        stored=stored,
    )


def _no_state_dict(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds no state dict that mm2 recognises",
        expected="a dict of tensors by name, alone or under " + ", ".join(_NESTED_KEYS),
        found=found,
        next_step="Save the model's state_dict() by itself, best as safetensors.",
    )

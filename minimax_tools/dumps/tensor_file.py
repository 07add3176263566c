"""Tensor files: `.pt` and safetensors, read without running code, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minimax_tools.errors import CaptureError
from minimax_tools.stored_dtype import SAFETENSORS_DTYPES, dtype_name
from minimax_tools.torch_file import TorchFile, is_plain, refusing, without_gradient

_SAFETENSORS = ".safetensors"
# Containers within containers in which a tensor is looked for; deeper ones are not searched.
_MAX_NESTING = 8
_COPY_AGAIN = "Copy it again from the host that wrote it, or run the capture again."


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A description of a tensor in a file."""

    keys: tuple[str | int, ...]  # its keys in a `.pt` file, the outermost first; in safetensors its name
    shape: tuple[int, ...]
    dtype: str  # its dtype, as in `bfloat16`; the code in safetensors if mm2 does not know it


def describe_structure(path: Path) -> Any:
    """Map the value of a `.pt` file; its tensors are not read before they are used."""
    with refusing(path, CaptureError, next_step=_COPY_AGAIN):
        return TorchFile(path).value


def list_tensors(path: Path) -> tuple[HeldTensor, ...]:
    """List the tensors of a file without reading their values."""
    if path.suffix == _SAFETENSORS:
        return _list_safetensors(path)
    return tuple(find_tensors(describe_structure(path)))


def find_tensors(value: Any, keys: tuple[str | int, ...] = ()) -> Iterator[HeldTensor]:
    """Yield the tensors in a value of `describe_structure`, found at `keys`: itself, or in tuples, lists and dicts."""
    for place, tensor in _walk(value, keys):
        yield HeldTensor(keys=place, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))


def _walk(value: Any, keys: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if is_plain(value):
            yield keys, value
    elif len(keys) < _MAX_NESTING:
        if isinstance(value, Mapping):
            inner = [(key, item) for key, item in value.items() if isinstance(key, (str, int))]
        else:
            inner = list(enumerate(value)) if isinstance(value, (tuple, list)) else []
        for key, item in inner:
            yield from _walk(item, (*keys, key))


def read_tensor(path: Path, keys: tuple[str | int, ...]) -> torch.Tensor:
    """Read one tensor of a file to the CPU, in the dtype that `list_tensors` tells."""
    if path.suffix == _SAFETENSORS:
        with _opened(path) as tensors:
            tensor: torch.Tensor = tensors.get_tensor(str(keys[0]))
            return tensor
    with refusing(path, CaptureError, next_step=_COPY_AGAIN):
        file = TorchFile(path)
    value = file.value
    try:
        for key in keys:
            value = value[key]
    except (LookupError, TypeError):
        value = None
    if not isinstance(value, torch.Tensor) or not is_plain(value):
        raise CaptureError(
            f"{path} holds no tensor at {'.'.join(map(str, keys)) or 'its top'}", next_step=_COPY_AGAIN
        )
    with refusing(path, CaptureError, next_step=_COPY_AGAIN):
        file.verify(value)
    # In memory of its own: the file may change now.
    return without_gradient(value).clone()


def load_restricted(path: Path) -> Any:
    """Read a file of torch.save: CPU tensors, containers and numbers; all else becomes records that run no code.

    The tensors stay mapped; those that `find_tensors` finds are read once, and checked by their checksums.
    """
    with refusing(path, CaptureError, next_step=_COPY_AGAIN):
        file = TorchFile(path)
        for _, tensor in _walk(file.value, ()):
            file.verify(tensor)
    return file.value


def _list_safetensors(path: Path) -> tuple[HeldTensor, ...]:
    with _opened(path) as tensors:
        listed = []
        for name in sorted(tensors.keys()):
            header = tensors.get_slice(name)
            code = str(header.get_dtype())
            dtype = SAFETENSORS_DTYPES[code].name if code in SAFETENSORS_DTYPES else code
            listed.append(HeldTensor(keys=(name,), shape=tuple(header.get_shape()), dtype=dtype))
        return tuple(listed)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise CaptureError(f"{path} cannot be read", found=str(error), next_step=_COPY_AGAIN) from error

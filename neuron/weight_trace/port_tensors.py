"""Port tensors: every tensor that a port's module holds, and the part of a large one that is traced.

A port tensor may be too large to copy, or to keep an origin for each element. So a trace of some experts keeps only the
part of it that depends on them. A tensor whose elements are all equal is kept as one number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

# Elements that are handled at once: in float64 they stay in a core's second-level cache, and torch takes one thread.
ELEMENTS_AT_ONCE = 1 << 15
# The integer dtype of an element's size in bytes.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A number that is a whole part of a name, as in `experts.3.w1` or `experts[3]`: the 3, not the 1.
_NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")


def find_port_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and tensors in plain attributes by name, each tensor once.

    Tensors outside the state dict count too: a port may keep weights there.
    """
    tensors: dict[str, torch.Tensor] = {}
    ids: set[int] = set()
    for name, tensor in _all_tensors(module):
        if id(tensor) not in ids and tensor.numel() and not tensor.is_meta:
            ids.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def name_pattern(name: str) -> str:
    """Return a tensor's name with every number replaced by `#`: the same for all experts."""
    return _NUMBER.sub("#", name)


def name_numbers(name: str) -> list[int]:
    """Return the numbers in a tensor's name, to sort tensors of experts by."""
    return [int(number) for number in _NUMBER.findall(name)]


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, submodule in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(submodule).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            entries = {"": value}
            if isinstance(value, (list, tuple)):
                entries = {f"[{index}]": entry for index, entry in enumerate(value)}
            elif isinstance(value, dict):
                entries = {f"[{key!r}]": entry for key, entry in value.items()}
            for suffix, entry in entries.items():
                if isinstance(entry, torch.Tensor):
                    yield f"{prefix}{name}{suffix}", entry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """Values of a port tensor after one pass."""

    shape: torch.Size
    values: torch.Tensor  # a copy of the tensor; a single element of no dims if all elements are equal

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Snapshot:
        """Copy a tensor's values."""
        flat = tensor.reshape(-1)
        first = _bits(flat[:1])
        is_uniform = all(bool((_bits(chunk) == first).all()) for chunk in flat.split(ELEMENTS_AT_ONCE))
        return cls(shape=tensor.shape, values=flat[0].clone() if is_uniform else tensor.clone())

    def changes(self, tensor: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of the tensor's first dim where elements differ from the snapshot, and a bool mask of these."""
        num_rows = max(1, ELEMENTS_AT_ONCE * len(tensor) // max(1, tensor.numel()))
        for start in range(0, len(tensor), num_rows):
            rows = slice(start, start + num_rows)
            before = self.values if self.values.dim() == 0 else self.values[rows]
            changed = _bits(tensor[rows]) != _bits(before)
            if changed.any():
                yield rows, changed

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Decide whether any element differs from the snapshot."""
        return any(True for _ in self.changes(tensor))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPart:
    """A part of a port tensor: some indices along each dim."""

    indices: tuple[torch.Tensor | None, ...]  # for each dim its indices, int64; None for all of them

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> TensorPart:
        """Select the whole tensor."""
        return cls(indices=(None,) * tensor.dim())

    @classmethod
    def first_element(cls, tensor: torch.Tensor) -> TensorPart:
        """Select one element, as a sample of a tensor whose elements are all equal."""
        return cls(indices=(torch.zeros(1, dtype=torch.int64),) * tensor.dim())

    @classmethod
    def changed(cls, snapshot: Snapshot, tensor: torch.Tensor) -> TensorPart | None:
        """Select the smallest part that holds every element that changed; None if nothing changed."""
        in_first_dim = torch.zeros(len(tensor), dtype=torch.bool)
        in_other_dims = torch.zeros(tensor.shape[1:], dtype=torch.bool)
        for rows, changed in snapshot.changes(tensor):
            in_first_dim[rows] = _any_along(changed, 0)
            in_other_dims |= changed.any(dim=0)
        if not bool(in_first_dim.any()):
            return None
        by_dim = [in_first_dim, *(_any_along(in_other_dims, dim) for dim in range(in_other_dims.dim()))]
        return cls(indices=tuple(None if bool(mask.all()) else mask.nonzero().flatten() for mask in by_dim))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return that part of a tensor; the tensor itself if the part is the whole."""
        for dim, index in enumerate(self.indices):
            if index is not None:
                tensor = _select(tensor, dim, index)
        return tensor

    def of_snapshot(self, snapshot: Snapshot) -> torch.Tensor:
        """Return that part of a snapshot."""
        if snapshot.values.dim() == len(snapshot.shape):
            return self.of(snapshot.values)
        # One number stands for all elements.
        sizes = [
            size if index is None else len(index)
            for size, index in zip(snapshot.shape, self.indices, strict=True)
        ]
        return snapshot.values.expand(sizes)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's elements as integers: torch compares no FP8, and a NaN equals itself."""
    integers = INTEGERS.get(tensor.itemsize)
    # A complex number of 16 bytes has no integer of its size.
    return _bits(tensor.real) if integers is None else tensor.view(integers)


def _any_along(mask: torch.Tensor, dim: int) -> torch.Tensor:
    """Return for each index of a dim whether the mask is True anywhere there."""
    return mask.movedim(dim, 0).flatten(1).any(dim=1) if mask.dim() > 1 else mask


def _select(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Select indices of a dim, in any dtype: torch has no index_select for FP8."""
    if tensor.is_floating_point() and tensor.itemsize == 1:
        return tensor.view(torch.uint8).index_select(dim, index).view(tensor.dtype)
    return tensor.index_select(dim, index)

"""Tensors of a file that torch.save wrote, described by the place of their elements; nothing is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

# Limit on a tensor's bytes: more than any file has, and still within int64, in which torch counts.
_MAX_BYTES = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageId:
    """A storage outside the pickle, as the pickle describes it."""

    key: str  # name of the storage in the file
    dtype: torch.dtype
    num_elements: int  # of the whole storage
    window: tuple[int, int] | None = None  # (first element, number) of a view, in old files only

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole storage."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A storage, or a window of one, by its bytes in the file."""

    key: str  # name of the storage in the file; all windows of the storage have the same
    dtype: torch.dtype  # dtype of its elements; uint8 if each tensor has its own dtype
    offset: int  # offset of its first byte in the file
    size_bytes: int  # length in bytes
    crc32: int | None = None  # checksum of exactly these bytes; None if the file has none

    def narrow(self, window: tuple[int, int] | None) -> Storage:
        """Return a window (first element, number of elements) of the storage, or for None the storage itself.

        Raises:
            ValueError: The window reaches outside the storage.
        """
        if window is None:
            return self
        first, size_bytes = (number * self.dtype.itemsize for number in window)
        if first < 0 or size_bytes < 0 or first + size_bytes > self.size_bytes:
            raise ValueError(f"a view of storage {self.key} reaches outside it")
        return replace(self, offset=self.offset + first, size_bytes=size_bytes, crc32=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor by its place in a storage.

    Raises:
        ValueError: The tensor reaches outside its storage.
    """

    storage: Storage  # storage of its elements
    dtype: torch.dtype  # stored dtype of the elements
    shape: tuple[int, ...]  # shape of the tensor
    stride: tuple[int, ...]  # strides in elements, one per dim, none negative
    start: int  # index of its first element in the storage
    is_conjugate: bool = False  # whether the values are the conjugates of the stored elements
    is_negative: bool = False  # whether the values are the negatives of the stored elements
    cast: torch.dtype | None = None  # dtype to which the values are cast when they are read; None for `dtype`

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.stride) or min((self.start, *self.shape, *self.stride)) < 0:
            raise ValueError(f"no tensor has shape {self.shape}, stride {self.stride}, start {self.start}")
        if math.prod(self.shape) * self.dtype.itemsize > _MAX_BYTES:
            raise ValueError(f"shape {self.shape} is larger than any file")
        if (self.start + self.extent) * self.dtype.itemsize > self.storage.size_bytes:
            raise ValueError(
                f"shape {self.shape}, stride {self.stride}, start {self.start} reach outside storage "
                f"{self.storage.key} of {self.storage.size_bytes} bytes"
            )

    @property
    def extent(self) -> int:
        """Number of the storage's elements from the tensor's first to its last, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def offset(self) -> int:
        """Offset of the tensor's first element in the file, in bytes."""
        return self.storage.offset + self.start * self.dtype.itemsize

    @property
    def extent_bytes(self) -> int:
        """Bytes from the tensor's first element to the end of its last."""
        return self.extent * self.dtype.itemsize

    @property
    def given_dtype(self) -> torch.dtype:
        """Dtype of the tensor's values."""
        return self.dtype if self.cast is None else self.cast

    @property
    def is_verbatim(self) -> bool:
        """True if the values are the stored bytes, in their order: contiguous, and nothing to be computed."""
        if self.is_conjugate or self.is_negative or self.given_dtype != self.dtype:
            return False
        if 0 in self.shape:
            return True
        contiguous_stride = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            # The stride of a dim of size 1 is never used.
            if size != 1 and stride != contiguous_stride:
                return False
            contiguous_stride *= size
        return True

    @property
    def repeats_elements(self) -> bool:
        """True if the tensor has more elements than its extent, as an expanded tensor has."""
        return math.prod(self.shape) > self.extent

    def narrow(self, dim: int, start: int, length: int) -> StoredTensor:
        """Return the part of the tensor that `torch.narrow` gives."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return replace(self, shape=shape, start=self.start + start * self.stride[dim])

    def view(self, extent: torch.Tensor) -> torch.Tensor:
        """Return the tensor's values, given the file's bytes from `offset` on: `extent`, uint8 [extent_bytes].

        Without conjugation, negation or a cast the result shares the memory of `extent`.
        """
        elements = extent.view(self.dtype)
        tensor = elements.as_strided(self.shape, self.stride, elements.storage_offset())
        tensor = tensor.conj() if self.is_conjugate else tensor
        tensor = tensor.neg() if self.is_negative else tensor
        return tensor if self.cast is None else tensor.to(self.cast)

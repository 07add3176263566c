"""Tensor origin: the source element that landed at each element of a port tensor.

A port tensor is a tensor that the port's module holds. A source element is an element of the checkpoint's layer; its
number is given by `source_tensors`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.capture.digests import dtype_name

# In place of a source element's number:
CONSTANT = -1  # no source element landed
COMPUTED = -2  # the value is computed from several source elements
NOT_SAMPLED = -3  # a source element of an expert that is not traced landed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorOrigin:
    """Origins of a port tensor's elements.

    Args:
        numbers: Source numbers, int64, of the tensor's shape or of its traced part; or `CONSTANT`, `COMPUTED`,
            `NOT_SAMPLED`.
        gain: Factor of the landed elements; None if it differs between them, or none landed.
        gains: Factor of each element, float32, of the shape of `numbers`; None if `gain` tells it.
        offset: Number added to the landed elements; None if it differs between them, or none landed.
        rounding: Largest relative error of the landed elements after gain and offset are undone; 0 if exact.
        rounding_float32: The same of landed elements of the router's tensors, which stay float32 in every run.
        constant: Value of the `CONSTANT` elements; None if it differs between them, or there are none.
        weight_sum: Mean over `COMPUTED` elements of the sum of their weights; None without such elements.
        num_mixed: Number of source elements in a `COMPUTED` element, if their weights are equal; None if unknown, for
            example because the conversion is not linear.
        mixed_kinds: Kinds of source tensors that the `COMPUTED` elements depend on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: torch.Tensor
    gain: float | None
    offset: float | None
    rounding: float
    rounding_float32: float
    constant: float | None
    weight_sum: float | None = None
    num_mixed: float | None = None
    mixed_kinds: tuple[str, ...] = ()
    gains: torch.Tensor | None = None

    @property
    def has_landed(self) -> bool:
        """True if a source element landed here."""
        return bool((self.numbers >= 0).any())

    @property
    def num_computed(self) -> int:
        """Number of computed elements."""
        return int((self.numbers == COMPUTED).sum())

    @property
    def num_constant(self) -> int:
        """Number of elements that do not depend on the checkpoint."""
        return int((self.numbers == CONSTANT).sum())

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {dtype_name(self.dtype)}"

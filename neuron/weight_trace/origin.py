"""Origin: for every element of a place the number of the checkpoint's element that landed there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.capture.manifest import dtype_name

# What stands where no single element landed: nothing of the checkpoint did, several did, or one that is not followed.
CONSTANT, COMPUTED, ASIDE = -1, -2, -3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origin:
    """Where the elements of one place come from.

    Args:
        name: The place's.
        shape: Its shape.
        dtype: Its dtype.
        numbers: Of its shape, or of the part of it that what is followed lands in, int64: the number of the element
            that landed there, `CONSTANT` where nothing of the checkpoint does, `COMPUTED` where no single element tells
            the value, `ASIDE` where it is one that is not followed.
        gain: What single elements are multiplied by, where that is one number; None where it differs.
        offset: What is added to them likewise.
        rounding: The largest relative error of the elements that landed, their scale apart; 0 where they came as given.
        rounding_float32: The same, of those that are given in float32 whatever the run's dtype.
        constant: The value of the constant elements, where that is one number.
        weight_sum: Of computed elements, what the weights of the elements they are made of add up to, on average.
        num_mixed: Of computed elements, of how many elements of equal weight each would be made; None where it cannot
            be told, as where the conversion is not linear.
        mixed_kinds: The kinds of tensors that computed elements depend on.
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

    @property
    def landed(self) -> torch.Tensor:
        """The numbers that landed here, flat."""
        return self.numbers[self.numbers >= 0]

    @property
    def num_computed(self) -> int:
        """How many elements are computed."""
        return int((self.numbers == COMPUTED).sum())

    @property
    def num_constant(self) -> int:
        """How many elements do not depend on the checkpoint."""
        return int((self.numbers == CONSTANT).sum())

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {dtype_name(self.dtype)}"

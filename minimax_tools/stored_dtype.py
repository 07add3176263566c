"""StoredDtype: the dtype of a stored tensor by name and size, known without torch, which takes seconds to load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """A dtype of torch, by its name there."""

    name: str  # such as `bfloat16`
    itemsize: int  # bytes of an element
    is_floating_point: bool = True

    @classmethod
    def of(cls, dtype: torch.dtype) -> StoredDtype:
        """Return the description of a dtype."""
        return cls(dtype_name(dtype), dtype.itemsize, is_floating_point=dtype.is_floating_point)

    @classmethod
    def from_json(cls, name: object) -> StoredDtype:
        """Return the dtype of that name.

        Raises:
            TypeError: There is no such dtype.
        """
        for dtype in SAFETENSORS_DTYPES.values():
            if dtype.name == name:
                return dtype
        raise TypeError(f"expected a dtype, found {name!r:.80}")

    def to_json(self) -> str:
        """Return the name."""
        return self.name

    def as_torch(self) -> torch.dtype:
        """Return the dtype itself; this loads torch."""
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype

    def __str__(self) -> str:
        return f"torch.{self.name}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


FLOAT32 = StoredDtype("float32", 4)
FLOAT16 = StoredDtype("float16", 2)
BFLOAT16 = StoredDtype("bfloat16", 2)
FLOAT8_E4M3FN = StoredDtype("float8_e4m3fn", 1)
# Dtypes of safetensors files that mm2 reads, by their names in a header.
SAFETENSORS_DTYPES: Mapping[str, StoredDtype] = MappingProxyType(
    {
        "F64": StoredDtype("float64", 8),
        "F32": FLOAT32,
        "F16": FLOAT16,
        "BF16": BFLOAT16,
        "F8_E4M3": FLOAT8_E4M3FN,
        "F8_E5M2": StoredDtype("float8_e5m2", 1),
        "I64": StoredDtype("int64", 8, is_floating_point=False),
        "I32": StoredDtype("int32", 4, is_floating_point=False),
        "I16": StoredDtype("int16", 2, is_floating_point=False),
        "I8": StoredDtype("int8", 1, is_floating_point=False),
        "U8": StoredDtype("uint8", 1, is_floating_point=False),
        "BOOL": StoredDtype("bool", 1, is_floating_point=False),
    }
)
# Names in a safetensors header by dtype.
SAFETENSORS_NAMES: Mapping[StoredDtype, str] = MappingProxyType(
    {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
)

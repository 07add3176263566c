"""Low precision: rows of a table as a port holds them that stores them in fewer bits. R rows, H hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from compare.diagnosis.catalogue.low_bits import bfloat16, fp8_groups, integer_groups
from compare.diagnosis.mistake import values_of

_LARGEST_FP8 = 448.0


def _fp8(rows: torch.Tensor) -> torch.Tensor:
    return rows.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn).float()


ROUNDINGS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "bfloat16": bfloat16,
        "float16": lambda rows: rows.half().float(),
        "float8_e4m3fn": _fp8,
        "float8_e4m3fn with a scale for each row": lambda rows: fp8_groups(rows, rows.shape[-1]),
        "int8 with a scale for each row": lambda rows: integer_groups(rows, rows.shape[-1], largest=127.0),
    }
)
# Dtypes that a table may be held in.
roundings = values_of("dtype", *ROUNDINGS)

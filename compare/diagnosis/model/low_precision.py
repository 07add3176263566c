"""Low precision: rows of a table as a port holds them that stores them in fewer bits. R rows, H hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from compare.diagnosis.model.mistake import each

_LARGEST_FP8, _LARGEST_INT8 = 448.0, 127.0


def _fp8(rows: torch.Tensor) -> torch.Tensor:
    return rows.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn).float()


def _fp8_rows(rows: torch.Tensor) -> torch.Tensor:
    scale = (rows.abs().amax(-1, keepdim=True) / _LARGEST_FP8).clamp(min=1e-12)
    return _fp8(rows / scale) * scale


def _int8_rows(rows: torch.Tensor) -> torch.Tensor:
    scale = (rows.abs().amax(-1, keepdim=True) / _LARGEST_INT8).clamp(min=1e-12)
    return (rows / scale).round() * scale


ROUNDINGS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "bfloat16": lambda rows: rows.bfloat16().float(),
        "float16": lambda rows: rows.half().float(),
        "float8_e4m3fn": _fp8,
        "float8_e4m3fn with a scale for each row": _fp8_rows,
        "int8 with a scale for each row": _int8_rows,
    }
)


# Dtypes that a table may be held in.
roundings = each("dtype", lambda _: ROUNDINGS)

"""Low bits: values rounded as ports round them that hold fewer bits; all functions return float32.

R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from compare.catalogue.candidates import values_of

_LARGEST_FP8 = 448.0  # of float8_e4m3fn
# Keeps the scale of a block of zeros from being zero.
_LEAST_SCALE = 1e-12


def bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Round to BF16."""
    return values.bfloat16().float()


def fp8_blocks(weight: torch.Tensor, block: int = 128) -> torch.Tensor:
    """Round [R,C] to FP8 (e4m3) with one scale for each `block` x `block` elements."""
    rounded = torch.empty_like(weight)
    for row in range(0, weight.shape[0], block):
        for column in range(0, weight.shape[1], block):
            place = slice(row, row + block), slice(column, column + block)
            rounded[place] = _fp8_scaled(weight[place], weight[place].abs().amax())
    return rounded


def fp8_groups(states: torch.Tensor, width: int = 128) -> torch.Tensor:
    """Round [...,C] to FP8 (e4m3) with one scale for each `width` neighbours of a row."""
    parts = [_fp8_scaled(part, part.abs().amax(-1, keepdim=True)) for part in states.split(width, dim=-1)]
    return torch.cat(parts, dim=-1)


def integer_groups(weight: torch.Tensor, width: int, *, largest: float) -> torch.Tensor:
    """Round [R,C] to integers up to `largest` (7 in four bits), with one scale for each `width` neighbours of a row."""
    parts = []
    for part in weight.split(width, dim=-1):
        scale = (part.abs().amax(-1, keepdim=True) / largest).clamp(min=_LEAST_SCALE)
        parts.append((part / scale).round().clamp(-largest - 1, largest) * scale)
    return torch.cat(parts, dim=-1)


def offset_groups(weight: torch.Tensor, width: int, *, num_steps: int) -> torch.Tensor:
    """Round [R,C] to `num_steps` even steps from the least to the largest of each `width` neighbours of a row."""
    parts = []
    for part in weight.split(width, dim=-1):
        least = part.amin(-1, keepdim=True)
        step = ((part.amax(-1, keepdim=True) - least) / num_steps).clamp(min=_LEAST_SCALE)
        parts.append(((part - least) / step).round() * step + least)
    return torch.cat(parts, dim=-1)


def _fp8_scaled(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Round values that share a scale: `largest`, their largest magnitude, becomes the largest FP8 number."""
    scale = (largest / _LARGEST_FP8).clamp(min=_LEAST_SCALE)
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def _fp8_unscaled(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn).float()


# Dtypes in which a port may hold the embedding or the head [R,C], and how their rows are rounded to them.
ROUNDINGS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "bfloat16": bfloat16,
        "float16": lambda rows: rows.half().float(),
        "float8_e4m3fn": _fp8_unscaled,
        "float8_e4m3fn with a scale for each row": lambda rows: fp8_groups(rows, rows.shape[-1]),
        "int8 with a scale for each row": lambda rows: integer_groups(rows, rows.shape[-1], largest=127.0),
    }
)
# Candidates of a mistake's parameter `dtype`.
rounding_dtypes = values_of("dtype", *ROUNDINGS)

FP8_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def round_to_fp8(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round to an FP8 format without a scale, clipped at its largest number: float32."""
    largest = torch.finfo(FP8_DTYPES[dtype]).max
    return values.float().clamp(-largest, largest).to(FP8_DTYPES[dtype]).float()

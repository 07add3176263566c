"""Low bits: values rounded as mistaken ports round them; all give float32. R rows, C columns, G a group's width."""

from __future__ import annotations

import torch

_LARGEST_FP8 = 448.0


def bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Round to BF16."""
    return values.bfloat16().float()


def fp8_blocks(weight: torch.Tensor, block: int = 128) -> torch.Tensor:
    """Round [R,C] to FP8 (e4m3) with one scale for each block x block."""
    rounded = torch.empty_like(weight)
    for row in range(0, weight.shape[0], block):
        for column in range(0, weight.shape[1], block):
            place = slice(row, row + block), slice(column, column + block)
            rounded[place] = _fp8(weight[place], weight[place].abs().amax())
    return rounded


def fp8_groups(states: torch.Tensor, width: int = 128) -> torch.Tensor:
    """Round [...,C] to FP8 (e4m3) with one scale for each `width` neighbours of a row."""
    parts = [_fp8(part, part.abs().amax(-1, keepdim=True)) for part in states.split(width, dim=-1)]
    return torch.cat(parts, dim=-1)


def integer_groups(weight: torch.Tensor, width: int, *, largest: float) -> torch.Tensor:
    """Round [R,C] to symmetric integers up to `largest`, with one scale for each `width` neighbours of a row."""
    parts = []
    for part in weight.split(width, dim=-1):
        scale = (part.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-12)
        parts.append((part / scale).round().clamp(-largest - 1, largest) * scale)
    return torch.cat(parts, dim=-1)


def _fp8(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    scale = (largest / _LARGEST_FP8).clamp(min=1e-12)
    return (values / scale).to(torch.float8_e4m3fn).float() * scale

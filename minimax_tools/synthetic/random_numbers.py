"""Random numbers that are the same on every host, and FP8 matrices made of them.

A seed and a name choose a stream of integers (PCG64). A matrix is `code × scale_inv`. A code is a random byte looked up
in a table of 256 FP8 values. A scale gives a block of 128 × 128 its spread.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch

from minimax_tools.checkpoint.fp8 import BLOCK_SIZE, scale_shape

_FP8_MAX = 448.0


def _unit_levels() -> torch.Tensor:
    # Quantiles of the logistic distribution: the largest of 256 lies at 3.4 standard deviations, not at 2.9.
    quantiles = torch.tensor([math.log((2 * i + 1) / (511 - 2 * i)) for i in range(256)], dtype=torch.float64)
    return quantiles / quantiles.square().mean().sqrt()


LEVELS = _unit_levels()  # float64, [256], mean 0, variance 1: the value of each byte
_LEVEL_MAX = float(LEVELS.max())


class RandomStream:
    """A stream of random numbers that depends on a seed and a name only."""

    def __init__(self, *, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest, "little"))

    def draw_bytes(self, count: int) -> bytearray:
        """Draw `count` uniform bytes."""
        words = self._bits.random_raw(-(-count // 8)).astype("<u8", copy=False)
        return bytearray(words.view(np.uint8).data[:count])

    def draw_normal(self, *shape: int) -> torch.Tensor:
        """Draw float64 numbers of mean 0 and variance 1, within ±4.9, nearly normal."""
        parts = np.frombuffer(self.draw_bytes(16 * math.prod(shape)), dtype="<u2").reshape(*shape, 8)
        # A sum of eight integers is exact on every host; normals of a library are not.
        sums = torch.from_numpy(parts.astype(np.int64).sum(-1)).double()
        return (sums - 4 * 65535) / (65536 * math.sqrt(8 / 12))

    def draw_gain(self, *shape: int, spread: float) -> torch.Tensor:
        """Draw positive lognormal factors, float64, whose mean square is 1."""
        gain = torch.exp(spread * self.draw_normal(*shape))
        return gain / gain.square().mean().sqrt()

    def draw_order(self, count: int) -> torch.Tensor:
        """Draw a random order of the integers below `count`, int64."""
        return torch.argsort(self.draw_normal(count), stable=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRecipe:
    """Distribution of a matrix: standard deviation, a factor for each row, the spread between blocks."""

    std: float
    row_gain: torch.Tensor  # float64, [rows]
    num_columns: int
    block_spread: float

    def scales(self, stream: RandomStream) -> torch.Tensor:
        """Draw the matrix's `weight_scale_inv`: float32, one value for each block."""
        peak_gain = _block_peaks(self.row_gain)
        grid = scale_shape((len(self.row_gain), self.num_columns))
        block_gain = stream.draw_gain(*grid, spread=self.block_spread)
        return (block_gain * peak_gain[:, None] * (self.std * _LEVEL_MAX / _FP8_MAX)).float()

    def codes(self, stream: RandomStream) -> torch.Tensor:
        """Draw the matrix's FP8 codes as uint8 [rows, columns]; the largest row of a block reaches ±448."""
        share = (
            self.row_gain / _block_peaks(self.row_gain).repeat_interleave(BLOCK_SIZE)[: len(self.row_gain)]
        )
        codes = bytearray()
        for value, num_rows in zip(*torch.unique_consecutive(share, return_counts=True), strict=True):
            table = (
                (LEVELS * (float(value) * _FP8_MAX / _LEVEL_MAX))
                .float()
                .to(torch.float8_e4m3fn)
                .view(torch.uint8)
            )
            codes += stream.draw_bytes(int(num_rows) * self.num_columns).translate(bytes(table.tolist()))
        return torch.frombuffer(codes, dtype=torch.uint8).view(-1, self.num_columns)


def _block_peaks(row_gain: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.max() for part in row_gain.split(BLOCK_SIZE)])

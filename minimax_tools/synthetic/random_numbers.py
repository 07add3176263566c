"""Random numbers that are the same on every host, and FP8 matrices made of them.

A seed and a name choose a stream of integers (PCG64). A matrix is `code × scale_inv`. A code is a random byte looked up
in a table of 256 FP8 values. Each block of 128 × 128 codes has a scale, which sets the block's standard deviation.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch

from minimax_tools.model.quantisation import BLOCK_SIZE, scale_shape

# Largest finite value of float8_e4m3fn.
_FP8_MAX = 448.0


def _unit_levels() -> torch.Tensor:
    # 256 quantiles of the logistic distribution, whose tails are heavier than the normal's: the largest lies at 3.4
    # standard deviations instead of 2.9. The quantile of probability p = (2i+1)/512 is log(p / (1-p)).
    quantiles = torch.tensor([math.log((2 * i + 1) / (511 - 2 * i)) for i in range(256)], dtype=torch.float64)
    return quantiles / quantiles.square().mean().sqrt()


# The value of each byte: float64 [256], mean 0, variance 1.
LEVELS = _unit_levels()
_LEVEL_MAX = float(LEVELS.max())


class RandomStream:
    """A stream of random numbers that depends on a seed and a name only."""

    def __init__(self, *, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest, "little"))

    def draw_bytes(self, count: int) -> bytearray:
        """Draw `count` uniform bytes."""
        words = self._bits.random_raw(math.ceil(count / 8)).astype("<u8", copy=False)
        return bytearray(words.view(np.uint8).data[:count])

    def draw_normal(self, *shape: int) -> torch.Tensor:
        """Draw float64 numbers of mean 0 and variance 1, within ±4.9, nearly normal."""
        parts = np.frombuffer(self.draw_bytes(16 * math.prod(shape)), dtype="<u2").reshape(*shape, 8)
        # A sum of eight uniform integers is exact on every host; a library's normal numbers are not.
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
    """Distribution of a matrix."""

    std: float  # of a row of gain 1
    row_gain: torch.Tensor  # factor of each row, float64 [rows]
    num_columns: int
    block_spread: float  # standard deviation of the logarithm of the blocks' factors

    def scales(self, stream: RandomStream) -> torch.Tensor:
        """Draw the matrix's `weight_scale_inv`: float32, one value for each block."""
        peak_gain = _block_peaks(self.row_gain)
        grid = scale_shape((len(self.row_gain), self.num_columns))
        block_gain = stream.draw_gain(*grid, spread=self.block_spread)
        return (block_gain * peak_gain[:, None] * (self.std * _LEVEL_MAX / _FP8_MAX)).float()

    def codes(self, stream: RandomStream) -> torch.Tensor:
        """Draw the matrix's FP8 codes as uint8 [rows, columns]; the largest row of a block reaches ±448."""
        row_peaks = _block_peaks(self.row_gain).repeat_interleave(BLOCK_SIZE)[: len(self.row_gain)]
        shares, run_lengths = torch.unique_consecutive(self.row_gain / row_peaks, return_counts=True)
        codes = bytearray()
        # Rows of one gain share a table of codes.
        for share, num_rows in zip(shares.tolist(), run_lengths.tolist(), strict=True):
            values = (LEVELS * (share * _FP8_MAX / _LEVEL_MAX)).float()
            table = bytes(values.to(torch.float8_e4m3fn).view(torch.uint8).tolist())
            codes += stream.draw_bytes(num_rows * self.num_columns).translate(table)
        return torch.frombuffer(codes, dtype=torch.uint8).view(-1, self.num_columns)


def _block_peaks(row_gain: torch.Tensor) -> torch.Tensor:
    """Return the largest gain of each block of rows."""
    return torch.stack([part.max() for part in row_gain.split(BLOCK_SIZE)])

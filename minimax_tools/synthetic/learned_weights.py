"""LearnedWeights: tensors of a trained model in the dtypes of a checkpoint, FP8 in blocks included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from minimax_tools.model import weight_names
from minimax_tools.model.quantisation import BLOCK_SIZE

# Largest finite value of float8_e4m3fn.
_LARGEST_CODE = 448.0


class LearnedWeights:
    """Maker of a checkpoint's tensors from float32 tensors.

    Args:
        tensors: All tensors of the model by the hub's names, float32 on the CPU.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def make(self, name: str, *, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Make the tensor `name` of `shape` in `dtype`, as one block of data; FP8 codes and scales are computed."""
        if name.endswith(weight_names.SCALE_SUFFIX):
            tensor = quantise(self._tensors[name.removesuffix("_scale_inv")])[1]
        elif dtype == torch.float8_e4m3fn:
            tensor = quantise(self._tensors[name])[0]
        else:
            tensor = self._tensors[name].to(dtype)
        assert tensor.shape == shape, f"{name} is {list(tensor.shape)}, planned as {list(shape)}"
        yield tensor


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight [R,C] to FP8 in blocks of 128 × 128.

    The largest value of a block becomes ±448, the largest code; a block of zeros has scale 1.

    Returns:
        Codes, float8_e4m3fn [R,C], and the scales to multiply them with, float32 [ceil(R/128), ceil(C/128)].
    """
    num_rows, num_columns = weight.shape
    # Zeros up to whole blocks.
    padding = (0, -num_columns % BLOCK_SIZE, 0, -num_rows % BLOCK_SIZE)
    padded = torch.nn.functional.pad(weight.float(), padding)
    # [rows of blocks, 128, columns of blocks, 128]
    blocks = padded.unflatten(1, (-1, BLOCK_SIZE)).unflatten(0, (-1, BLOCK_SIZE))
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / _LARGEST_CODE, 1.0)
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:num_rows, :num_columns]
    return codes.clamp(-_LARGEST_CODE, _LARGEST_CODE).to(torch.float8_e4m3fn).contiguous(), scale

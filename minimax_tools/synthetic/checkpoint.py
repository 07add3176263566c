"""Synthetic checkpoints: a MiniMax-M2 of any size, in the hub's layout, filled with random numbers of a seed.

FP8, BF16 and float32 checkpoints of one seed are one model: linear layers are always drawn in FP8, and dequantised for
the other dtypes (see `random_weights`). Shards are written with one tensor in memory at a time, into a temporary folder
that is renamed at the end.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from minimax_tools.checkpoint.expected_tensors import TensorSize, model_tensors
from minimax_tools.checkpoint.fp8 import find_ragged_widths
from minimax_tools.checkpoint.header import divide_into_shards, encode_header
from minimax_tools.checkpoint.weight_files import INDEX_FILE
from minimax_tools.errors import UsageError
from minimax_tools.machine.files import new_folder
from minimax_tools.model.quantisation import BLOCK_SIZE
from minimax_tools.model.spec import ModelSpec
from minimax_tools.stored_dtype import StoredDtype
from minimax_tools.synthetic.random_weights import SyntheticWeights
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import write_tokenizer

_log = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn

# Size of a shard unless another is asked for: that of MiniMax-M2's shards on the hub, but at least four shards, so that
# small checkpoints have several too.
_HUB_SHARD_BYTES = 1_840_000_000
_LEAST_SHARDS = 4


class TensorMaker(Protocol):
    """Maker of a model's tensors by their full names."""

    def make(self, name: str, *, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Make the tensor `name` in consecutive blocks of rows, which together have `shape`, on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticCheckpoint:
    """A written checkpoint; `size_bytes` counts the tensors' data, without headers."""

    folder: Path
    num_tensors: int
    num_shards: int
    size_bytes: int


def synthesize(
    output: Path, *, model: SyntheticModel, dtype: torch.dtype, shard_size_bytes: int | None, seed: int
) -> SyntheticCheckpoint:
    """Write a checkpoint of `model` to the absent or empty folder `output`, its linear layers stored in `dtype`.

    The same arguments give the same bytes. A shard's data exceed `shard_size_bytes` only by a single larger tensor;
    None gives four or more shards, at most as large as the hub's.

    Raises:
        UsageError: `output` is not empty, or the quantities cannot be stored in `dtype`.
        CheckpointError: The checkpoint does not fit the file system, or cannot be written.
    """
    plan = plan_tensors(model, dtype=dtype)
    size_bytes = sum(tensor.size_bytes for tensor in plan)
    weights = SyntheticWeights(model.spec(), seed=seed)
    remedy = "Name an --output with more room, or ask for fewer layers."
    with new_folder(output, size_bytes=size_bytes, remedy=remedy) as folder:
        ids = write_tokenizer(folder, vocab_size=model.vocab_size)
        write_json(folder / "config.json", model.config(dtype=dtype, token_ids=ids))
        num_shards = write_shards(folder, plan, weights, shard_size_bytes=shard_size_bytes)
    return SyntheticCheckpoint(
        folder=output, num_tensors=len(plan), num_shards=num_shards, size_bytes=size_bytes
    )


def write_shards(
    folder: Path, plan: tuple[TensorSize, ...], weights: TensorMaker, *, shard_size_bytes: int | None
) -> int:
    """Write the planned tensors, in order, to shards with their index; return the number of shards.

    `shard_size_bytes` is that of `synthesize`.
    """
    size_bytes = sum(tensor.size_bytes for tensor in plan)
    if shard_size_bytes is None:
        shard_size_bytes = min(_HUB_SHARD_BYTES, math.ceil(size_bytes / _LEAST_SHARDS))
    divided = divide_into_shards(plan, shard_size_bytes)
    # Numbered from 0, as MiniMax-M2's shards on the hub.
    shards = {
        f"model-{place:05}-of-{len(divided):05}.safetensors": shard for place, shard in enumerate(divided)
    }
    for file_name, shard in shards.items():
        _write_shard(folder / file_name, shard, weights)
        _log.info("%s: %d tensors", file_name, len(shard))
    weight_map = {tensor.name: file_name for file_name, shard in shards.items() for tensor in shard}
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})
    return len(shards)


def plan_tensors(model: SyntheticModel, *, dtype: torch.dtype) -> tuple[TensorSize, ...]:
    """List the tensors of a checkpoint whose linear layers are stored in `dtype`, in alphabetical order as on the hub.

    A width that does not fit FP8's blocks, or another dtype than FP8, BF16 and float32, is a UsageError.
    """
    if dtype not in (FP8, torch.bfloat16, torch.float32):
        raise UsageError(
            f"no checkpoint is written in {dtype}", expected="float8_e4m3fn, bfloat16 or float32"
        )
    spec = model.spec()
    if dtype == FP8:
        _refuse_ragged_blocks(spec)
    # Of tensors that are no linear layers of attention or experts.
    plain_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    tensors = model_tensors(spec, matrix_dtype=StoredDtype.of(dtype), plain_dtype=StoredDtype.of(plain_dtype))
    return tuple(sorted(tensors, key=lambda tensor: tensor.name))


def write_tensor(file: BinaryIO, tensor: TensorSize, weights: TensorMaker) -> None:
    """Make a tensor's data block by block, and append them to a file."""
    start = file.tell()
    for block in weights.make(tensor.name, shape=tensor.shape, dtype=tensor.dtype.as_torch()):
        file.write(block.contiguous().view(torch.uint8).numpy().data)
    written = file.tell() - start
    assert written == tensor.size_bytes, f"{tensor.name}: {written} bytes of {tensor.size_bytes}"


def _refuse_ragged_blocks(spec: ModelSpec) -> None:
    ragged = find_ragged_widths(spec)
    if ragged:
        raise UsageError(
            "these widths do not fit FP8's blocks",
            expected=f"multiples of {BLOCK_SIZE}, or smaller: readers derive the block from the scales' shape",
            found="; ".join(ragged),
            next_step="Change them, or ask for --dtype bfloat16.",
        )


def _write_shard(path: Path, shard: tuple[TensorSize, ...], weights: TensorMaker) -> None:
    with path.open("wb") as file:
        file.write(encode_header(shard))
        for tensor in shard:
            write_tensor(file, tensor, weights)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a value as indented JSON, with a newline at the end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

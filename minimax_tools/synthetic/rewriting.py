"""A checkpoint written again with its tensors changed, into a folder of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import UsageError
from minimax_tools.machine.new_folder import new_folder
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.checkpoint import PlannedTensor, write_json, write_shards
from minimax_tools.synthetic.equivalent import CHANGES

_CONFIG = "config.json"


class _ReadyTensors:
    """Tensors that are written as they are."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def make(self, name: str, *, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The tensor `name`, whole."""
        tensor = self._tensors[name]
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), f"{name} is not as planned"
        yield tensor


def rewrite_checkpoint(source: Path, output: Path, *, changes: Sequence[str], seed: int) -> None:
    """Write the checkpoint `source` to `output` with changes that keep what it computes.

    All tensors are in memory at once: this is for small models.

    Args:
        source: A checkpoint in BF16 or float32.
        output: A folder that does not exist yet or is empty.
        changes: Names out of `equivalent.CHANGES`, in the order of their application.
        seed: Seed of what the changes draw.

    Raises:
        UsageError: A change is unknown, the checkpoint is in FP8, a scale leaves the range of its dtype, or
            `output` holds something.
        CheckpointError: `source` cannot be read, or `output` cannot be written.
    """
    unknown = [change for change in changes if change not in CHANGES]
    if unknown:
        raise UsageError(f"there is no change {', '.join(unknown)}", expected=f"of {', '.join(CHANGES)}")
    config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
    spec = ModelSpec.from_folder(source)
    with CheckpointReader(source) as reader:
        tensors = {name: reader.read(name) for name in reader.index.names}
    if any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values()):
        raise UsageError(
            f"the weights at {source} are FP8",
            expected="BF16 or float32: a block of FP8 has one scale for all its channels",
            next_step="Change the BF16 copy of the model.",
        )
    generator = torch.Generator().manual_seed(seed)
    for change in changes:
        CHANGES[change](tensors, config, spec, generator)
    _refuse_overflow(tensors)
    plan = tuple(
        PlannedTensor(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
        for name, tensor in sorted(tensors.items())
    )
    size_bytes = sum(tensor.size_bytes for tensor in plan)
    with new_folder(output, size_bytes=size_bytes, remedy="Name an --output with more room.") as folder:
        for path in source.iterdir():
            if path.is_file() and path.name != _CONFIG and "safetensors" not in path.name:
                shutil.copy(path, folder)
        write_json(folder / _CONFIG, config)
        write_shards(folder, plan, _ReadyTensors(tensors), shard_size_bytes=None)


def _refuse_overflow(tensors: dict[str, torch.Tensor]) -> None:
    spoilt = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if spoilt:
        raise UsageError("these changes leave the range of the stored dtype", found=", ".join(spoilt[:4]))

"""Checkpoint folders without FP8, for ports that read the files themselves."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from minimax_tools.checkpoint.filling import ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.machine.size import format_size
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_of
from minimax_tools.stored_dtype import FLOAT8_E4M3FN

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"


@contextmanager
def plain_checkpoint(reader: CheckpointReader, spec: ModelSpec, *, dtype: torch.dtype) -> Iterator[Path]:
    """Open a folder of the model's tensors without FP8: the checkpoint itself, or a copy for the time of the block.

    The copy holds the hub's names, values in `dtype`, router gates and correction biases in float32. Its config.json
    names no quantisation.

    Raises:
        CheckpointError: A tensor cannot be read, or the disk is too small for the copy.
    """
    if not any(reader.index[name].dtype == FLOAT8_E4M3FN for name in reader.index.names):
        yield reader.folder
        return
    with tempfile.TemporaryDirectory(prefix="mm2-plain-") as folder:
        _write(ModelTensors.open(reader, spec, dtype), Path(folder), config=dict(spec.raw))
        yield Path(folder)


def _write(tensors: ModelTensors, folder: Path, *, config: dict[str, object]) -> None:
    # The router's few tensors in float32 do not count.
    needed = sum(math.prod(tensors.given_shape(name)) for name in tensors) * tensors.dtype.itemsize
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder.parent} is too small for a copy of the checkpoint without FP8, which the port reads",
            expected=format_size(needed),
            found=f"{format_size(free)} free",
            next_step="Set TMPDIR to a larger disk, or give --model a copy of the checkpoint in BF16.",
        )
    names_of: dict[str, list[str]] = {}
    for name in tensors:
        layer = layer_of(name)
        file = "model.safetensors" if layer is None else f"model-layer-{layer:03}.safetensors"
        names_of.setdefault(file, []).append(name)
    for file, names in names_of.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in names_of.items() for name in names}
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.pop("quantization_config", None)
    (folder / _CONFIG).write_text(json.dumps(config))

"""The JSON files that describe a checkpoint: config.json, and those of tokenizer and generation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minimax_tools.errors import CheckpointError, UnsupportedModelError, shorten
from minimax_tools.machine.json_file import read_json

CONFIG_FILE = "config.json"
# Sizes under the names of the architectures that mm2 knows; a size beyond these limits is no model's.
_SIZES = (
    "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads",
    "head_dim", "intermediate_size", "n_inner", "vocab_size", "num_local_experts", "num_experts",
    "num_experts_per_tok", "max_position_embeddings", "rotary_dim",
)  # fmt: skip
MAX_SIZE = 1 << 48
_MAX_LAYERS = 1 << 20
_LAYERS = ("num_hidden_layers", "n_layer")


def require_sizes(config: Mapping[str, Any], path: Path) -> None:
    """Check the sizes of a config.json of any model; those that it leaves out, or that are null, are not judged.

    Raises:
        CheckpointError: A size is no size.
    """
    faults = []
    for key in _SIZES:
        size, most = config.get(key), _MAX_LAYERS if key in _LAYERS else MAX_SIZE
        # A bool is an int in Python.
        if size is not None and not (type(size) is int and 0 < size <= most):
            faults.append(f"{key} is {shorten(repr(size))}")
    if faults:
        raise CheckpointError(
            f"{path} describes no model",
            expected="sizes that are whole numbers from 1",
            found="; ".join(faults),
            next_step="Fetch the file again.",
        )


def read_checkpoint_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint's folder.

    Raises:
        CheckpointError: The folder holds none, or one that cannot be read.
    """
    path = folder / CONFIG_FILE
    if path.exists():
        return read_config_file(path)
    refuse_gguf(folder)
    raise CheckpointError(
        f"no checkpoint at {folder}",
        expected="a folder with config.json and safetensors shards",
        found="no config.json" if folder.is_dir() else "no such folder",
        next_step="Give --model a folder or a hub id, or make a small one: mm2-split synthesize.",
    )


def refuse_gguf(folder: Path) -> None:
    """Refuse a folder that holds GGUF, in place of what was looked for.

    Raises:
        UnsupportedModelError: It does.
    """
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files:
        raise UnsupportedModelError(
            f"{folder} holds GGUF, which mm2 does not read",
            expected="config.json and safetensors shards",
            found=files[0],
            next_step="Give --model the checkpoint that it was made of.",
        )


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: The file cannot be read, or holds something else.
    """
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read", found=str(error), next_step="Fetch the file again."
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object", next_step="Fetch the file again.")
    return config

"""The JSON files that describe a checkpoint: config.json, and those of tokenizer and generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minimax_tools.errors import CheckpointError
from minimax_tools.machine.json_file import read_json

CONFIG_FILE = "config.json"


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

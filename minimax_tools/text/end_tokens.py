"""The token ids that end a generated text, from the checkpoint's configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minimax_tools.errors import CheckpointError

# The first file that names end tokens counts, as in transformers.
_CONFIG_FILES = ("generation_config.json", "config.json")
_KEY = "eos_token_id"


def read_end_tokens(folder: Path) -> frozenset[int]:
    """Return the token ids that end a generated text; empty if the checkpoint names none.

    Raises:
        CheckpointError: A file cannot be read, or its end tokens are not ids.
    """
    for name in _CONFIG_FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            value: Any = json.loads(path.read_text(encoding="utf-8")).get(_KEY)
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read", found=str(error), next_step="Fetch the file again."
            ) from error
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) for token in ids):
            raise CheckpointError(
                f"{path}: {_KEY} is not a token id", expected="an integer or a list", found=repr(value)
            )
        return frozenset(ids)
    return frozenset()

"""The tokens that end a text, as a checkpoint's files name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minimax_tools.errors import CheckpointError

# The first that names some tells, as with transformers.
_FILES = ("generation_config.json", "config.json")
_KEY = "eos_token_id"


def read_end_tokens(folder: Path) -> frozenset[int]:
    """The ids after which a generated text ends; none where the checkpoint names none.

    Raises:
        CheckpointError: A file cannot be read, or names something else than ids.
    """
    for name in _FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            named: Any = json.loads(path.read_text(encoding="utf-8")).get(_KEY)
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read", found=str(error), next_step="Fetch the file again."
            ) from error
        if named is None:
            continue
        ids = named if isinstance(named, list) else [named]
        if not all(isinstance(number, int) for number in ids):
            raise CheckpointError(
                f"{path}: {_KEY} is no token id", expected="an integer or a list", found=repr(named)
            )
        return frozenset(ids)
    return frozenset()

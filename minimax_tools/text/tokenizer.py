"""The checkpoint's tokenizer.json: text to token ids and back, without transformers; and its end tokens."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from minimax_tools.errors import CheckpointError
from minimax_tools.model.config_file import CONFIG_FILE, read_config_file
from minimax_tools.text.chat import render_chat

TOKENIZER_NAME = "tokenizer.json"


def encode_texts(folder: Path, texts: list[str], *, chat: bool) -> list[list[int]]:
    """Return the token ids of each text; with `chat` each text is a user's message in the chat template.

    Raises:
        CheckpointError: The checkpoint has no tokenizer or, with `chat`, no chat template that renders.
    """
    tokenizer = _read_tokenizer(folder)
    if chat:
        # The template writes the special tokens itself.
        return [
            list(tokenizer.encode(render_chat(folder, text), add_special_tokens=False).ids) for text in texts
        ]
    return [list(tokenizer.encode(text).ids) for text in texts]


def decode_rows(folder: Path, rows: list[list[int]]) -> list[str]:
    """Decode token rows into text, special tokens kept.

    Raises:
        CheckpointError: The checkpoint has no tokenizer.
    """
    tokenizer = _read_tokenizer(folder)
    return [str(tokenizer.decode(row, skip_special_tokens=False)) for row in rows]


def has_tokenizer(folder: Path) -> bool:
    """Decide whether the checkpoint comes with a tokenizer."""
    return (folder / TOKENIZER_NAME).is_file()


def _read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    path = folder / TOKENIZER_NAME
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder} has no {TOKENIZER_NAME}",
            next_step="Give --input-ids or --seq-len instead of text, or add the file.",
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(
            f"{path} cannot be read", found=str(error), next_step="Fetch the file again."
        ) from error


# The first file that names end tokens counts, as in transformers.
_FILES = ("generation_config.json", CONFIG_FILE)
_KEY = "eos_token_id"


def read_end_tokens(folder: Path) -> frozenset[int]:
    """Return the token ids that end a generated text; empty if the checkpoint names none.

    Raises:
        CheckpointError: A file cannot be read, or its end tokens are not ids.
    """
    for name in _FILES:
        path = folder / name
        if not path.is_file():
            continue
        named = read_config_file(path).get(_KEY)
        if named is None:
            continue
        ids = named if isinstance(named, list) else [named]
        if not all(isinstance(number, int) for number in ids):
            raise CheckpointError(
                f"{path}: {_KEY} is not a token id", expected="an integer or a list", found=repr(named)
            )
        return frozenset(ids)
    return frozenset()

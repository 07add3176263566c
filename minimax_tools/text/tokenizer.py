"""The checkpoint's tokenizer.json: text to token ids and back, without transformers."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from minimax_tools.errors import CheckpointError
from minimax_tools.text.chat import render_chat

TOKENIZER_NAME = "tokenizer.json"


def encode_texts(folder: Path, texts: list[str], *, chat: bool) -> list[list[int]]:
    """Return the token ids of each text.

    Args:
        folder: Folder of the checkpoint.
        texts: Texts to encode.
        chat: Whether each text is a user's message, to be put into the chat template.

    Raises:
        CheckpointError: The checkpoint has no tokenizer or, with `chat`, no chat template that renders.
    """
    tokenizer = _read_tokenizer(folder)
    if chat:
        texts = [render_chat(folder, text) for text in texts]
    # The chat template writes the special tokens itself.
    return [list(tokenizer.encode(text, add_special_tokens=not chat).ids) for text in texts]


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
    except Exception as error:
        # tokenizers raises no narrower class.
        raise CheckpointError(
            f"{path} cannot be read", found=str(error), next_step="Fetch the file again."
        ) from error

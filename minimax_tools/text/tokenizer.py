"""The checkpoint's tokenizer.json: text to token ids and back, without transformers; and the ids that end a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from minimax_tools.errors import CheckpointError, shorten
from minimax_tools.model.config_file import CONFIG_FILE, read_config_file
from minimax_tools.text.chat import render_chat

TOKENIZER_NAME = "tokenizer.json"
# The first file that names end tokens counts, as in transformers.
_CONFIG_FILES = ("generation_config.json", CONFIG_FILE)
_END_TOKEN_KEY = "eos_token_id"


def encode_texts(folder: Path, texts: list[str], *, chat: bool) -> list[list[int]]:
    """Return the token ids of each text. With `chat`, each is put into the chat template as a user's message.

    Raises:
        CheckpointError: The checkpoint has no tokenizer or, with `chat`, no chat template that renders.
    """
    tokenizer = _read_tokenizer(folder)
    if chat:
        texts = [render_chat(folder, text) for text in texts]
    # The chat template writes the special tokens itself.
    return [list(tokenizer.encode(text, add_special_tokens=not chat).ids) for text in texts]


def encode_answered(
    folder: Path, pairs: Sequence[tuple[str, str]], *, has_special: Sequence[bool]
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of texts and of their continuations.

    A text's ids are those of the text alone. Its continuation's are those that follow them in both texts joined, or, if
    a token spans the border, those of the continuation alone. With `has_special`, a text has its special tokens itself.

    Raises:
        CheckpointError: The checkpoint has no tokenizer.
    """
    tokenizer = _read_tokenizer(folder)
    found = []
    for (text, continuation), is_rendered in zip(pairs, has_special, strict=True):
        own = list(tokenizer.encode(text, add_special_tokens=not is_rendered).ids)
        joined = list(tokenizer.encode(text + continuation, add_special_tokens=not is_rendered).ids)
        if joined[: len(own)] == own:
            found.append((own, joined[len(own) :]))
        else:
            found.append((own, list(tokenizer.encode(continuation, add_special_tokens=False).ids)))
    return found


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


def read_end_tokens(folder: Path) -> frozenset[int]:
    """Return the token ids that end a generated text; empty if the checkpoint names none.

    Raises:
        CheckpointError: A file cannot be read, or its end tokens are not ids.
    """
    for name in _CONFIG_FILES:
        path = folder / name
        if not path.is_file():
            continue
        value = read_config_file(path).get(_END_TOKEN_KEY)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        # A bool is an int in Python.
        if not all(type(token) is int for token in ids):
            raise CheckpointError(
                f"{path}: {_END_TOKEN_KEY} is not a token id",
                expected="a whole number, or a list of them",
                found=shorten(repr(value)),
                next_step="Fetch the file again.",
            )
        return frozenset(ids)
    return frozenset()


def until_end(row: list[int], end_tokens: frozenset[int]) -> list[int]:
    """Cut generated tokens after the first that ends the text."""
    for index, token in enumerate(row):
        if token in end_tokens:
            return row[: index + 1]
    return row


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

"""The checkpoint's tokenizer.json and chat template, used as transformers does, without transformers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
import tokenizers

from minimax_tools.errors import CheckpointError, shorten
from minimax_tools.model.spec import CONFIG_FILE, read_config_file

# Keys of tokenizer_config.json that a template may name.
_SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def render_messages(folder: Path, messages: Sequence[tuple[str, str]]) -> str:
    """Render messages, role and content each, as the text that the model continues, special tokens included.

    Raises:
        CheckpointError: The checkpoint has no chat template, or one that cannot be rendered.
    """
    path = folder / "tokenizer_config.json"
    config = read_config_file(path) if path.is_file() else {}
    special = {
        name: _token_text(config[name], name=name, path=path)
        for name in _SPECIAL_TOKENS
        if config.get(name) is not None
    }
    contents = [{"role": role, "content": content} for role, content in messages]
    text = _find_template(folder, config)
    try:
        template = _environment().from_string(text)
        return template.render(
            messages=contents, tools=None, documents=None, add_generation_prompt=True, **special
        )
    except Exception as error:  # a template is a foreign program: anything can come
        raise CheckpointError(
            f"the chat template of {folder} cannot be rendered",
            found=f"{type(error).__name__}: {error}",
            next_step="Leave --chat out to run the raw text.",
        ) from error


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    # A template is a foreign program, so it runs in jinja2's sandbox.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _find_template(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    template = _read_template_file(path) if path.is_file() else config.get("chat_template")
    if isinstance(template, list):
        # Several named templates: transformers takes the one called "default".
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if not isinstance(template, str):
        raise CheckpointError(
            f"{folder} has no chat template", next_step="Leave --chat out to run the raw text."
        )
    return template


def _read_template_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read", found=str(error), next_step="Fetch the file again."
        ) from error


def _token_text(token: object, *, name: str, path: Path) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise CheckpointError(
            f"{path}: {name} is no token",
            expected='text, or an object with text as "content"',
            found=shorten(repr(token)),
            next_step="Fetch the file again.",
        )
    return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Replaces jinja2's own filter, which escapes HTML. The parameters are those of transformers' filter.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


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
        texts = [render_messages(folder, [("user", text)]) for text in texts]
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


def decode_if_possible(folder: Path, rows: Sequence[Sequence[int]]) -> Sequence[str | None]:
    """Decode token rows into text; None for each if the checkpoint has no tokenizer."""
    return decode_rows(folder, [list(row) for row in rows]) if has_tokenizer(folder) else [None] * len(rows)


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

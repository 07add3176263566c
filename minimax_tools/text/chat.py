"""The chat template of a checkpoint, rendered as in transformers, without transformers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

from minimax_tools.errors import CheckpointError, shorten
from minimax_tools.model.config_file import read_config_file

# Keys of tokenizer_config.json that a template may name.
_SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def render_chat(folder: Path, prompt: str) -> str:
    """Render a user's prompt as the text that the model continues (see `render_messages`)."""
    return render_messages(folder, [("user", prompt)])


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

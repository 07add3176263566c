"""Prompts: what a user asked to run, turned into token rows without transformers.

The tokenizer is the checkpoint's own tokenizer.json; the chat template is rendered with jinja2 as
transformers renders it (sandboxed, blocks trimmed).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
import tokenizers

from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.inputs import Inputs, pad_rows, random_rows
from minimax_tools.spec import ModelSpec

_DEFAULT_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequest:
    """The input options of a command, as they were given; nothing is read before `build_inputs`."""

    prompts: tuple[str, ...] = ()
    prompts_file: Path | None = None
    chat: bool = False
    input_ids: tuple[str, ...] = ()
    seq_lens: tuple[int, ...] = ()
    batch_size: int = 1
    padding_side: str = "right"
    pad_to: tuple[int, ...] = ()
    max_length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        sources = [bool(self.prompts or self.prompts_file), bool(self.input_ids), bool(self.seq_lens)]
        if sum(sources) > 1:
            raise UsageError(
                "the inputs come from several sources",
                expected="one of --prompt/--prompts-file, --input-ids, --seq-len",
            )
        if self.batch_size > 1 and (sources[0] or sources[1]):
            raise UsageError("--batch-size repeats random rows only", next_step="Repeat --prompt or --input-ids.")


def build_inputs(request: InputRequest, *, folder: Path, spec: ModelSpec) -> Inputs:
    """The batch that `request` describes, for the checkpoint in `folder`.

    Raises:
        UsageError: An id outside the vocabulary, an empty row, an unreadable file.
        CheckpointError: Text was given and the checkpoint has no tokenizer.
    """
    rows, source = _rows(request, folder=folder, spec=spec)
    if request.max_length is not None:
        rows = [row[: request.max_length] for row in rows]
    _refuse_foreign_ids(rows, spec.vocab_size)
    return pad_rows(
        rows,
        padding_side=request.padding_side,
        buckets=request.pad_to,
        pad_token_id=int(spec.raw.get("pad_token_id") or 0),
        source=source,
    )


def decode_tokens(folder: Path, rows: list[list[int]]) -> list[str]:
    """The text of token rows, special tokens kept.

    Raises:
        CheckpointError: The checkpoint has no tokenizer.
    """
    tokenizer = _load_tokenizer(folder)
    return [str(tokenizer.decode(row, skip_special_tokens=False)) for row in rows]


def _rows(request: InputRequest, *, folder: Path, spec: ModelSpec) -> tuple[list[list[int]], str]:
    if request.input_ids:
        return [row for text in request.input_ids for row in _parse_ids(text)], "--input-ids"
    if request.prompts or request.prompts_file:
        texts = [*request.prompts, *_read_prompts(request.prompts_file)]
        return _tokenize(texts, folder=folder, chat=request.chat), "chat prompts" if request.chat else "prompts"
    lengths = request.seq_lens or (_DEFAULT_LENGTH,)
    rows = random_rows(lengths, batch_size=request.batch_size, vocab_size=spec.vocab_size, seed=request.seed)
    return rows, f"random ids of seed {request.seed}"


def _parse_ids(text: str) -> list[list[int]]:
    try:
        if Path(text).suffix == ".json":
            loaded = json.loads(Path(text).read_text(encoding="utf-8"))
            return [[int(value) for value in row] for row in (loaded if isinstance(loaded[0], list) else [loaded])]
        return [[int(part) for part in text.split(",")]]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UsageError(
            f"--input-ids {text!r} cannot be read",
            expected="ids like 1,2,3 or a .json file with a list of rows",
            found=str(error),
        ) from error


def _read_prompts(path: Path | None) -> list[str]:
    if path is None:
        return []
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return [line for line in text.splitlines() if line.strip()]
    try:
        loaded = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is no JSON", found=str(error)) from error
    if not isinstance(loaded, list) or not all(isinstance(entry, str) for entry in loaded):
        raise UsageError(f"{path} holds no prompts", expected="a JSON list of strings")
    return loaded


def _tokenize(texts: list[str], *, folder: Path, chat: bool) -> list[list[int]]:
    tokenizer = _load_tokenizer(folder)
    if chat:
        texts = [_render_chat(folder, text) for text in texts]
    return [list(tokenizer.encode(text, add_special_tokens=not chat).ids) for text in texts]


def _load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json", next_step="Give --input-ids or --seq-len instead of text, or add the file."
        )
    return tokenizers.Tokenizer.from_file(str(path))


def _render_chat(folder: Path, prompt: str) -> str:
    config = _tokenizer_config(folder)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_template_error
    template = environment.from_string(_chat_template(folder, config))
    special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    messages = [{"role": "user", "content": prompt}]
    try:
        return template.render(messages=messages, add_generation_prompt=True, **special)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template of {folder} cannot be rendered", found=str(error)) from error


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config


def _chat_template(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if not isinstance(template, str):
        raise CheckpointError(f"{folder} has no chat template", next_step="Leave --chat out to run the raw text.")
    return template


def _token_text(token: str | dict[str, Any] | None) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _refuse_foreign_ids(rows: list[list[int]], vocab_size: int) -> None:
    for row_index, row in enumerate(rows):
        for token in row:
            if not 0 <= token < vocab_size:
                raise UsageError(
                    f"row {row_index} holds the id {token}", expected=f"ids from 0 to {vocab_size - 1}"
                )

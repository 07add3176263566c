"""Samples of lm-evaluation-harness: the file `samples_TASK_DATE.jsonl` that `lm_eval --log_samples` writes.

Each line is a document under one filter, with its requests in `arguments`: an object `{"gen_args_0": {"arg_0": …}}`, or
in older files a list of lists. A request to generate has a context and options; a request for a log-likelihood has a
context and its continuation, one for each possible answer. `resps` holds what the model gave to each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimax_tools.errors import UsageError
from minimax_tools.machine.json_file import parse_json

# Names of metrics that are 1 for a right answer, in files that do not list their metrics.
_RIGHTNESS = ("exact_match", "acc", "acc_norm", "pass@1", "prompt_level_strict_acc", "em", "mc1", "f1")
_STEP = "Give a samples_*.jsonl of lm_eval --log_samples."


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LmEvalSample:
    """A request of a document, and the model's answer to it."""

    name: str  # `doc 17`, or `doc 17, choice 2`
    context: str | tuple[Message, ...]  # text, or a chat that the checkpoint's template turns into text
    continuation: str  # the text whose likelihood was asked for, or the generated one
    is_generated: bool
    log_likelihood: float | None = (
        None  # of the continuation, as the file recorded it; None if it was generated
    )
    target: str = ""  # the right answer, as the task gives it
    is_right: bool | None = None  # whether the document was answered rightly; None if no metric says so


def read_lm_eval_samples(path: Path) -> list[LmEvalSample]:
    """Read all requests of a file; a document that several filters judged counts once, right if one says so.

    Raises:
        UsageError: The file cannot be read, or is none of lm_eval's samples.
    """
    documents: dict[str, list[dict[str, Any]]] = {}
    for number, record in _records(path):
        documents.setdefault(str(record.get("doc_id", number)), []).append(record)
    samples: list[LmEvalSample] = []
    for doc_id, records in documents.items():
        try:
            samples += _samples_of(doc_id, records)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path}, doc {doc_id}: its requests cannot be read",
                expected="arguments and resps of each request",
                found=f"{type(error).__name__}: {error}",
                next_step=_STEP,
            ) from error
    return samples


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", found=str(error), next_step=_STEP) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            raise UsageError(
                f"{path}, line {number} is no JSON", found=str(error), next_step=_STEP
            ) from error
        if not isinstance(record, dict) or not {"arguments", "resps"} <= record.keys():
            found = f"the keys {', '.join(sorted(record)[:8])}" if isinstance(record, dict) else "no object"
            raise UsageError(
                f"{path}, line {number} is no sample of lm_eval",
                expected="an object with arguments and resps",
                found=found,
                next_step=_STEP,
            )
        yield number, record


def _samples_of(doc_id: str, records: list[dict[str, Any]]) -> Iterator[LmEvalSample]:
    """Yield the requests of one document, which each of its records repeats."""
    first = records[0]
    requests = _requests(first["arguments"])
    rights = [_is_right(record) for record in records]
    is_right = None if all(right is None for right in rights) else any(rights)
    for number, (request, responses) in enumerate(zip(requests, first["resps"], strict=True)):
        name = f"doc {doc_id}" + (f", choice {number}" if len(requests) > 1 else "")
        yield _sample(name, request, responses, target=_text(first.get("target", "")), is_right=is_right)


def _sample(
    name: str, request: tuple[Any, ...], responses: Any, *, target: str, is_right: bool | None
) -> LmEvalSample:
    context = _context(request[0])
    # `resps` holds one response for each repeat; older files leave out that list.
    response = responses[0] if isinstance(responses, list) else responses
    if len(request) > 1 and isinstance(request[1], str):
        pair = response if isinstance(response, list) else responses
        return LmEvalSample(
            name=name,
            context=context,
            continuation=request[1],
            is_generated=False,
            log_likelihood=float(pair[0]),
            target=target,
            is_right=is_right,
        )
    if len(request) == 1:
        # The likelihood of a whole text: what follows its first token is the answer.
        return LmEvalSample(
            name=name,
            context="",
            continuation=str(context),
            is_generated=False,
            target=target,
            is_right=is_right,
        )
    return LmEvalSample(
        name=name,
        context=context,
        continuation=str(response),
        is_generated=True,
        target=target,
        is_right=is_right,
    )


def _requests(arguments: Any) -> list[tuple[Any, ...]]:
    """Return the arguments of each request, in order."""
    if isinstance(arguments, Mapping):
        return [
            tuple(request[f"arg_{index}"] for index in range(len(request))) for request in arguments.values()
        ]
    return [tuple(request) for request in arguments]


def _context(argument: Any) -> str | tuple[Message, ...]:
    """Read a context: text, or the messages of a chat as JSON text, perhaps within a list."""
    text = argument[0] if isinstance(argument, list) and argument else argument
    if not isinstance(text, str):
        raise TypeError(f"a context of type {type(text).__name__}")
    if text.lstrip().startswith("["):
        try:
            messages = parse_json(text)
        except ValueError:
            return text
        if isinstance(messages, list) and all(isinstance(one, dict) and "role" in one for one in messages):
            return tuple(
                Message(role=str(one["role"]), content=_text(one.get("content", ""))) for one in messages
            )
    return text


def _is_right(record: Mapping[str, Any]) -> bool | None:
    """Decide by its metrics whether a record's answer is right: all that are numbers are above 0."""
    names = record.get("metrics") or [name for name in _RIGHTNESS if name in record]
    values = [record.get(name) for name in names]
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    return all(number > 0 for number in numbers) if numbers else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

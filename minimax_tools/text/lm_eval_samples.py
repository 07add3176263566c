"""Samples of lm-evaluation-harness: the file `samples_TASK_DATE.jsonl` that `lm_eval --log_samples` writes.

Each line is a document under one filter, with its requests in `arguments`: an object `{"gen_args_0": {"arg_0": …}}`, or
in older files a list of lists. A request to generate has a context and options; a request for a log-likelihood has a
context and its continuation, one for each possible answer. `resps` holds what the model gave to each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from minimax_tools.errors import UsageError, shorten
from minimax_tools.json_codec import DecodeError, decode
from minimax_tools.machine.json_file import parse_json

# Names of metrics that are 1 for a right answer, in files that do not list their metrics.
_RIGHTNESS = ("exact_match", "acc", "acc_norm", "pass@1", "prompt_level_strict_acc", "em", "mc1", "f1")
_PAIR = 2  # a log-likelihood, and whether the continuation is the likeliest
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A line of the file; its metrics stand beside these keys, under their own names."""

    doc_id: int | str
    arguments: Any  # in one of two layouts (`_requests`)
    resps: tuple[Any, ...]
    target: Any = ""
    metrics: tuple[str, ...] = ()
    is_right: bool | None = None  # no key of the file: what the metrics say


def read_lm_eval_samples(path: Path) -> list[LmEvalSample]:
    """Read all requests of a file, at least one.

    A document that several filters judged counts once, right if one says so.

    Raises:
        UsageError: The file cannot be read, or is none of lm_eval's samples.
    """
    documents: dict[str, list[_Record]] = {}
    for number, line in _lines(path):
        record = _parse_record(line, where=f"{path}, line {number}", number=number)
        documents.setdefault(str(record.doc_id), []).append(record)
    samples: list[LmEvalSample] = []
    for doc_id, records in documents.items():
        try:
            samples += _samples_of(doc_id, records)
        except ValueError as error:
            raise _unreadable(f"{path}, doc {doc_id}", error) from error
    if not samples:
        raise UsageError(f"{path} holds no sample", next_step=_STEP)
    return samples


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", found=str(error), next_step=_STEP) from error
    # Not `splitlines`: JSON may hold the other characters that it takes for the end of a line.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _parse_record(line: str, *, where: str, number: int) -> _Record:
    try:
        values = parse_json(line)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON", found=str(error), next_step=_STEP) from error
    if not isinstance(values, dict):
        raise UsageError(
            f"{where} is no sample of lm_eval",
            expected="an object with arguments and resps",
            found=shorten(repr(values)),
            next_step=_STEP,
        )
    try:
        # A sample without a number takes that of its line.
        record = decode(_Record, {"doc_id": number, **values})
    except DecodeError as error:
        raise _unreadable(where, error) from error
    return replace(record, is_right=_is_right(values, record.metrics))


def _unreadable(where: str, error: ValueError) -> UsageError:
    return UsageError(
        f"{where}: its requests cannot be read",
        expected="arguments and resps of each request",
        found=shorten(str(error)),
        next_step=_STEP,
    )


def _samples_of(doc_id: str, records: Sequence[_Record]) -> Iterator[LmEvalSample]:
    """Yield the requests of one document, which each of its records repeats; raise ValueError if one is none."""
    first = records[0]
    requests = _requests(first.arguments)
    rights = [record.is_right for record in records]
    is_right = None if all(right is None for right in rights) else any(rights)
    if len(requests) != len(first.resps):
        raise ValueError(f"{len(requests)} requests, and resps of {len(first.resps)}")
    for number, (request, responses) in enumerate(zip(requests, first.resps, strict=True)):
        name = f"doc {doc_id}" + (f", choice {number}" if len(requests) > 1 else "")
        yield _sample(name, request, responses, target=_text(first.target), is_right=is_right)


def _sample(
    name: str, request: tuple[Any, ...], responses: Any, *, target: str, is_right: bool | None
) -> LmEvalSample:
    sample = partial(LmEvalSample, name=name, target=target, is_right=is_right)
    context = _context(request[0])
    if len(request) > 1 and isinstance(request[1], str):
        likelihood = _log_likelihood(responses)
        return sample(context=context, continuation=request[1], is_generated=False, log_likelihood=likelihood)
    if len(request) == 1:
        # The likelihood of a whole text: what follows its first token is the answer.
        return sample(context="", continuation=decode(str, context), is_generated=False)
    answer = decode(str, _first_repeat(responses))
    return sample(context=context, continuation=answer, is_generated=True)


def _first_repeat(responses: Any) -> Any:
    """Return the first response: `resps` holds one for each repeat; older files leave out that list."""
    if not isinstance(responses, list):
        return responses
    if not responses:
        raise ValueError("a request without a response")
    return responses[0]


def _log_likelihood(responses: Any) -> float:
    """Read a log-likelihood: the first of a pair, as a number or as text."""
    first = _first_repeat(responses)
    pair = first if isinstance(first, list) else responses
    if not isinstance(pair, list) or len(pair) < _PAIR:
        raise ValueError(f"expected a log-likelihood and whether it is greedy, found {shorten(repr(pair))}")
    value = float(pair[0]) if isinstance(pair[0], str) else decode(float, pair[0])
    if math.isnan(value) or value == math.inf:
        raise ValueError(f"a log-likelihood of {value}")
    return value


def _requests(arguments: Any) -> list[tuple[Any, ...]]:
    """Return the arguments of each request, in order; each has one at least."""
    if isinstance(arguments, list):
        requests = [tuple(request) for request in decode(tuple[tuple[Any, ...], ...], arguments)]
    else:
        named = decode(dict[str, dict[str, Any]], arguments)
        requests = [_in_order(request) for request in named.values()]
    if not all(requests):
        raise ValueError("a request without arguments")
    return requests


def _in_order(request: Mapping[str, Any]) -> tuple[Any, ...]:
    names = [f"arg_{index}" for index in range(len(request))]
    if missing := set(names) - request.keys():
        raise ValueError(f"{', '.join(sorted(missing))} is missing")
    return tuple(request[name] for name in names)


def _context(argument: Any) -> str | tuple[Message, ...]:
    """Read a context: text, or the messages of a chat as JSON text, perhaps within a list."""
    text = decode(str, argument[0] if isinstance(argument, list) and argument else argument)
    if text.lstrip().startswith("["):
        try:
            messages = parse_json(text)
        except ValueError:
            return text
        if isinstance(messages, list) and all(isinstance(one, dict) and "role" in one for one in messages):
            return tuple(
                Message(role=decode(str, one["role"]), content=_text(one.get("content", "")))
                for one in messages
            )
    return text


def _is_right(values: Mapping[str, Any], metrics: Sequence[str]) -> bool | None:
    """Decide by its metrics whether a record's answer is right: all that are numbers are above 0."""
    names = metrics or [name for name in _RIGHTNESS if name in values]
    found = [values.get(name) for name in names]
    numbers = [
        value
        for value in found
        if isinstance(value, int) or (isinstance(value, float) and not math.isnan(value))
    ]
    return all(number > 0 for number in numbers) if numbers else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""Mutations of a JSON value, and of the bytes of any text file."""

from __future__ import annotations

import fnmatch
import json
import random
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Keys = tuple[str | int, ...]

DEEP = "[" * 100_000 + "]" * 100_000
_LONG = "x" * 100_000
# Text of JSON, because json has no form for some of them.
_WRONG_TEXTS = {
    "null": "null",
    "true": "true",
    "a number": "3",
    "a fraction": "1.5",
    "text": '"1"',
    "a list": "[]",
    "a list of a list": '[["1"]]',
    "an object": '{"a": 1}',
    "NaN": "NaN",
    "Infinity": "1e999",
    "-2**63": str(-(2**63)),
    "10**400": "1" + "0" * 400,
    "5000 digits": "9" * 5000,
    "deep lists": DEEP,
    "deep objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "a long text": json.dumps(_LONG),
    "a lone surrogate": '"\\ud800"',
    "a zero byte": '"\\u0000"',
}
# Kinds of JSON values that a key of this kind may hold.
_SAME_KIND = {
    "null": ("null",),
    "bool": ("bool",),
    "int": ("int",),
    "float": ("float", "int"),
    "str": ("str",),
    "list": ("list",),
    "dict": ("dict",),
}
_NEVER = ("NaN", "Infinity", "5000 digits", "deep lists", "deep objects")
_MARK = "@mutated@"
_MOST_ALIKE = 1  # keys of an object whose values are of one kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A damaged content of a file."""

    description: str
    content: bytes
    must_be_refused: bool  # else it may also be harmless


@dataclass(frozen=True, slots=True, kw_only=True)
class Leniency:
    """Keys of a kind of files at which a wrong value is harmless, as patterns of dotted keys such as `a.*.b`."""

    unread: tuple[str, ...] = ()  # keys whose value is never used, with all below
    optional: tuple[str, ...] = ()  # keys that may be missing
    nullable: tuple[str, ...] = ()  # keys that may be null
    also: tuple[tuple[str, str], ...] = ()  # keys, and another kind that their value may be of

    def spares(self, keys: Keys) -> bool:
        """Decide whether a key's value is never used."""
        return _fits(keys, self.unread) or any(_fits(keys[:end], self.unread) for end in range(1, len(keys)))


def mutate_systematically(value: Any, leniency: Leniency) -> Iterator[Mutation]:
    """Yield every key with every wrong value, missing and twice; of many keys alike, the first ones."""
    for keys in find_places(value):
        yield from mutate_place(value, keys, leniency)


def mutate_place(value: Any, keys: Keys, leniency: Leniency) -> Iterator[Mutation]:
    """Yield one key with every wrong value, missing and twice."""
    found = _at(value, keys)
    dotted = ".".join(map(str, keys)) or "the file"
    for name, text in _WRONG_TEXTS.items():
        wrong = _kind_of_text(name, text)
        kinds = (*_SAME_KIND[_kind(found)], *(kind for key, kind in leniency.also if _fits(keys, (key,))))
        is_other = wrong not in kinds and found is not None
        if wrong == "null" and _fits(keys, leniency.nullable):
            is_other = False
        # No file of mm2's may hold these, whoever reads the key.
        is_refused = name in _NEVER[2:] or ((name in _NEVER or is_other) and not leniency.spares(keys))
        yield Mutation(
            description=f"{dotted} is {name}",
            content=_with_text(value, keys, text),
            must_be_refused=is_refused,
        )
    if keys and isinstance(keys[-1], str):
        is_needed = not _fits(keys, leniency.optional) and not leniency.spares(keys)
        yield Mutation(
            description=f"{dotted} is missing",
            content=json.dumps(_without(value, keys)).encode(),
            must_be_refused=is_needed and _at(value, keys) is not None,
        )
        yield Mutation(
            description=f"{dotted} is there twice",
            content=_with_text(value, keys, f"null, {json.dumps(keys[-1])}: {json.dumps(found)}"),
            must_be_refused=True,
        )


def mutate_whole(content: bytes) -> Iterator[Mutation]:
    """Yield a text file as no text, empty, cut off, and with bytes that are no UTF-8."""
    middle = len(content) // 2
    for name, damaged in {
        "empty": b"",
        "one byte short": content.rstrip()[:-1],
        "half": content[:middle],
        "not UTF-8": content[:middle] + b"\xff\xfe" + content[middle:],
        "UTF-16": content.decode().encode("utf-16"),
        "zero bytes": b"\0" * 4096,
        "deep lists": DEEP.encode(),
        "twice": content + content,
    }.items():
        yield Mutation(description=f"the file is {name}", content=damaged, must_be_refused=True)
    yield Mutation(description="a byte-order mark", content=b"\xef\xbb\xbf" + content, must_be_refused=False)


def mutate_randomly(content: bytes, count: int, draw: random.Random) -> Iterator[Mutation]:
    """Yield contents with one to three random changes of bytes; some are valid again, or harmless."""
    for number in range(count):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 3)):
            _damage(damaged, draw)
        yield Mutation(description=f"random {number}", content=bytes(damaged), must_be_refused=False)


def _damage(content: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(content) + 1)
    stop = min(start + draw.randint(1, 40), len(content))
    piece = bytes(content[start:stop])
    tokens = (
        b"null",
        b"-1",
        b"1e400",
        b'"',
        b"{",
        b"]",
        b",",
        b"\0",
        b"\xf0",
        b"[[[[",
        b"99999999999999999999",
    )
    match draw.randrange(4):
        case 0 if stop > start:
            content[start] ^= 1 << draw.randrange(8)
        case 1:
            del content[start:stop]
        case 2:
            content[start:start] = piece
        case _:
            content[start:stop] = draw.choice(tokens)


def find_places(value: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Yield the keys of all values; of many alike within an object or list, the first ones."""
    yield keys
    items: Sequence[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    counts: dict[str, int] = {}
    for key, item in items:
        alike = json.dumps([_kind(item), sorted(item) if isinstance(item, dict) else isinstance(value, list)])
        if not isinstance(item, dict) and isinstance(value, dict) and not re.search(r"[\d./]", str(key)):
            alike = str(key)  # fields of a record
        counts[alike] = counts.get(alike, 0) + 1
        if counts[alike] <= _MOST_ALIKE:
            yield from find_places(item, (*keys, key))


def _at(value: Any, keys: Keys) -> Any:
    for key in keys:
        value = value[key]
    return value


def _with_text(value: Any, keys: Keys, text: str) -> bytes:
    """Return a value's JSON with another text at `keys`."""
    if not keys:
        return text.encode()
    copy = deepcopy(value)
    _at(copy, keys[:-1])[keys[-1]] = _MARK
    return json.dumps(copy).replace(json.dumps(_MARK), text).encode()


def _without(value: Any, keys: Keys) -> Any:
    copy = deepcopy(value)
    del _at(copy, keys[:-1])[keys[-1]]
    return copy


def _fits(keys: Keys, patterns: Sequence[str]) -> bool:
    dotted = ".".join(map(str, keys))
    return any(fnmatch.fnmatchcase(dotted, pattern) for pattern in patterns)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _kind_of_text(name: str, text: str) -> str:
    if name in _NEVER:
        return "float" if name in ("NaN", "Infinity") else name
    return _kind(json.loads(text))

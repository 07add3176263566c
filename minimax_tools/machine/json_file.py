"""Reading of JSON that somebody else wrote: bounded in size and depth, and with one kind of error.

Python's own reader ends deep nesting with a RecursionError, and so do the functions that walk what it returns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from minimax_tools.errors import shorten

# mm2's own files nest less than 20 deep.
MAX_DEPTH = 64
# An index of a million tensors takes a quarter of it.
MAX_BYTES = 1 << 29
_PIECE_BYTES = 1 << 24

ObjectHook = Callable[[dict[str, Any]], Any]

_TOO_DEEP = f"values nested more than {MAX_DEPTH} deep"


class JsonError(ValueError):
    """Text that is no JSON, that is larger or nested deeper than mm2 reads, or that names a key twice."""


def read_json(path: Path, *, object_hook: ObjectHook | None = None) -> Any:
    """Read the value of a JSON file in UTF-8; NaN and Infinity, which other tools write, are numbers.

    Args:
        path: The file.
        object_hook: Called with each object once it is parsed; its result takes the object's place.

    Raises:
        JsonError: It holds no JSON, more than `MAX_BYTES`, values nested deeper than `MAX_DEPTH`, or a key twice.
    """
    return parse_json(_read_bounded(path), object_hook=object_hook)


def read_own_json(path: Path, *, object_hook: ObjectHook | None = None) -> Any:
    """Read a JSON file of a kind that mm2 writes, as `read_json` does; it holds no NaN and no Infinity.

    Raises:
        JsonError: As of `read_json`, or a number is not finite.
    """
    return _parse(
        _read_bounded(path), object_hook, parse_float=_parse_finite, parse_constant=_refuse_constant
    )


def parse_json(text: str | bytes, *, object_hook: ObjectHook | None = None) -> Any:
    """Read the value of JSON text; bytes are UTF-8.

    Raises:
        JsonError: It is no JSON, more than `MAX_BYTES`, nested deeper than `MAX_DEPTH`, or names a key twice.
    """
    return _parse(text.encode(errors="surrogatepass") if isinstance(text, str) else text, object_hook)


def _read_bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        # Not by the file's size, which /dev/zero and a pipe do not tell.
        pieces = iter(partial(file.read, _PIECE_BYTES), b"")
        return b"".join(islice(pieces, MAX_BYTES // _PIECE_BYTES + 1))


def _parse(content: bytes, object_hook: ObjectHook | None, **number_hooks: Any) -> Any:
    def build_object(pairs: list[tuple[str, Any]]) -> Any:
        record = dict(pairs)
        if len(record) != len(pairs):
            # Of two values of one key, one reader takes the first and another the last.
            raise JsonError(f"the key {shorten(_first_repeated(pairs))!r} twice in one object")
        return record if object_hook is None else object_hook(record)

    if len(content) > MAX_BYTES:
        raise JsonError(f"more than {MAX_BYTES:,} bytes")
    try:
        value = json.loads(content.decode(), object_pairs_hook=build_object, **number_hooks)
    except JsonError:
        raise
    except UnicodeDecodeError as error:
        raise JsonError(f"text that is not UTF-8 ({error.reason})") from error
    except RecursionError:
        raise JsonError(_TOO_DEEP) from None
    except ValueError as error:
        # Also a number of more digits than Python reads.
        raise JsonError(str(error)) from error
    if _is_deeper(value, MAX_DEPTH):
        raise JsonError(_TOO_DEEP)
    if b"\\ud" in content.lower():
        _refuse_lone_surrogates(value)
    return value


def _refuse_lone_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise JsonError("text that is not Unicode, half of a pair of surrogates") from error


def _first_repeated(pairs: Iterable[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("a key is repeated")


def _parse_finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_constant(text)


def _refuse_constant(text: str) -> float:
    raise JsonError(f"the number {shorten(text)}, which is not finite")


def _is_deeper(value: Any, depth: int) -> bool:
    """Decide whether lists and objects nest deeper than `depth`."""
    level = [value]
    for _ in range(depth):
        level = [child for parent in level for child in _children(parent) if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()

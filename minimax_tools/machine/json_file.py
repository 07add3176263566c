"""Reading of JSON that somebody else wrote: bounded in size and depth, and with one kind of error.

Python's own reader ends deep nesting with a RecursionError, and so do the functions that walk what it returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

# mm2's own files nest less than 20 deep.
MAX_DEPTH = 64
# An index of a million tensors takes a quarter of it.
MAX_BYTES = 1 << 29
_PIECE_BYTES = 1 << 24

ObjectHook = Callable[[dict[str, Any]], Any]

_TOO_DEEP = f"values nested more than {MAX_DEPTH} deep"


class JsonError(ValueError):
    """Text that is no JSON, or that is larger or nested deeper than mm2 reads."""


def read_json(path: Path, *, object_hook: ObjectHook | None = None) -> Any:
    """Read the value of a JSON file in UTF-8.

    Args:
        path: The file.
        object_hook: Called with each object once it is parsed; its result takes the object's place.

    Raises:
        OSError: The file cannot be read.
        JsonError: It holds no JSON, more than `MAX_BYTES`, or values nested deeper than `MAX_DEPTH`.
    """
    with path.open("rb") as file:
        # Not by the file's size, which /dev/zero and a pipe do not tell.
        pieces = iter(partial(file.read, _PIECE_BYTES), b"")
        content = b"".join(islice(pieces, MAX_BYTES // _PIECE_BYTES + 1))
    return parse_json(content, object_hook=object_hook)


def parse_json(text: str | bytes, *, object_hook: ObjectHook | None = None) -> Any:
    """Read the value of JSON text; bytes are UTF-8.

    Raises:
        JsonError: It is no JSON, more than `MAX_BYTES`, or nested deeper than `MAX_DEPTH`.
    """
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if len(content) > MAX_BYTES:
        raise JsonError(f"more than {MAX_BYTES:,} bytes")
    try:
        value = json.loads(content.decode(), object_hook=object_hook)
    except UnicodeDecodeError as error:
        raise JsonError(f"text that is not UTF-8 ({error.reason})") from error
    except RecursionError:
        raise JsonError(_TOO_DEEP) from None
    except ValueError as error:
        # Also a number of more digits than Python reads.
        raise JsonError(str(error)) from error
    if _is_deeper(value, MAX_DEPTH):
        raise JsonError(_TOO_DEEP)
    return value


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

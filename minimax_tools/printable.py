"""Text of captures, ports and file names, made fit to be shown: control characters become escapes of Python's.

A terminal acts on control characters: it sets its title, moves the cursor, or reverses the reading direction.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

# Version of the keys and values of every JSON output. It changes where a reader of the old ones would be wrong.
SCHEMA_VERSION = 2
# Line of a command's text above the commands to run next, which end it.
NEXT_TITLE = "Next"
_LINES = "\n\t"  # what lines of text are made of


def printable(text: str, *, keep: str = _LINES) -> str:
    """Return text with each character of Unicode's category C (control, format, unassigned) as an escape of Python's.

    Args:
        text: Any text.
        keep: Characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(_escape(char) if _acts(char) and char not in keep else char for char in text)


def printable_json(value: Any) -> str:
    """Return a value as JSON of several lines; characters of category C are escapes of JSON's."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    if all(line.isprintable() for line in text.splitlines()):
        return text
    return "".join(json.dumps(char)[1:-1] if _acts(char) and char != "\n" else char for char in text)


def printable_values(value: Any) -> Any:
    """Return a JSON value with every text in it made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): printable_values(item) for key, item in value.items()}
    return [printable_values(item) for item in value] if isinstance(value, list | tuple) else value


def versioned(record: Mapping[str, Any], *, next_commands: Sequence[str]) -> dict[str, Any]:
    """Return a command's JSON object with its schema version and the commands to run next, each complete."""
    return {"schema_version": SCHEMA_VERSION, **record, "next": list(next_commands)}


def _acts(char: str) -> bool:
    return unicodedata.category(char).startswith("C")


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")

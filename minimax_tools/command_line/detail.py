"""How much a command shows: the variable DEBUG, and what the terminal can draw."""

from __future__ import annotations

import os
from typing import TextIO

# From this level of the variable DEBUG on every section is shown.
DETAILED_LEVEL = 11


def shows_details() -> bool:
    """Whether the variable DEBUG asks for every section."""
    text = os.environ.get("DEBUG", "")
    return text.isdecimal() and int(text) >= DETAILED_LEVEL


def shows_pictures(stream: TextIO) -> bool:
    """Whether a stream can draw more than ASCII."""
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"

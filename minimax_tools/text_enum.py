"""Text enum: an enum of strings whose text is the value, as `enum.StrEnum` of Python 3.11."""

from __future__ import annotations

from enum import Enum


class TextEnum(str, Enum):
    """A base of enums; `str` of a member is its value."""

    def __str__(self) -> str:
        return str(self.value)

"""Followed: what came of following the worst prompt to its golden and to the layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The commands that led from the worst prompt to a layer, and the outcome of the last."""

    commands: tuple[str, ...]  # as typed in a shell
    exit_code: int | None  # of the last command; None if none ran, because the golden cannot be made here
    record: Mapping[str, Any] | None = None  # the report of `mm2-test model` as JSON; None if it gave none
    report_file: str = ""  # the file that keeps it
    errors: str = ""  # what the command wrote to stderr, if it could not judge

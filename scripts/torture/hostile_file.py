"""HostileFile: a file to be damaged, with the command that reads it; and commands of readers that have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.errors import CaptureError
from torture.mutations import Leniency

REFUSED = (2, 3)  # exit codes of mm2's errors
_STRICT = Leniency()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileFile:
    """A file that a command reads."""

    name: str
    path: Path
    command: click.Command
    words: tuple[object, ...] = ()
    leniency: Leniency = _STRICT
    # How a text is stored, and read again: the header of a shard has its length before it.
    pack: Callable[[bytes], bytes] = bytes
    unpack: Callable[[bytes], bytes] = bytes
    is_json: bool = True
    refused: tuple[int, ...] = REFUSED  # exit codes of a refusal
    # Whether nothing need be refused: a damaged file is made anew, or its values are for another program to judge.
    may_pass: bool = False
    most_drawn: int | None = None  # systematic mutations that are drawn, if the command is slow; None for all
    folder: Path | None = None  # working folder of the command

    def read_text(self) -> bytes:
        """Read the text: all of the file, or the header of a shard."""
        return self.unpack(self.path.read_bytes())


def reading(read: Callable[[], object]) -> click.Command:
    """Make a command of a function that reads a file: its errors become messages and exit codes, as mm2's do."""

    def callback() -> None:
        read()

    return Mm2Command("read", callback=callback)


def finding(path: Path, find: Callable[[], object]) -> click.Command:
    """Make a command of a function that takes a damaged file as absent, and then gives None: that is its refusal."""

    def callback() -> None:
        if find() is None:
            raise CaptureError(f"{path} is taken as absent")

    return Mm2Command("find", callback=callback)

"""CapturePath: the type of options that take remote addresses beside folders: `s3://bucket/folder`.

A command gets the path of a folder on this machine, whichever was given. No server is asked while options are read, so
a wrong command line is told at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from minimax_tools.command_line.console import LateValue
from minimax_tools.remote.address import RemoteAddress, is_remote

# Placeholder in the help.
_METAVAR = "FOLDER|s3://…|hf://…"


class CapturePath(click.Path):
    """The folder of a capture, or the address of one: its mirror's folder, whose files come when they are read."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the placeholder in the help."""
        return _METAVAR

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the folder that `value` names; of an address, what finds the folder when the command runs.

        Raises:
            UsageError: It is an address that mm2 does not read.
        """
        address = _read_address(value, ctx)
        return super().convert(value, param, ctx) if address is None else _CaptureThere(address)


@dataclass(frozen=True, slots=True)
class _CaptureThere(LateValue):
    """The capture at an address."""

    address: RemoteAddress

    def find(self, ctx: click.Context) -> Path:
        """Return the folder of the capture's mirror.

        Raises:
            CannotRunError: There is no capture at the address, or it cannot be read.
        """
        from minimax_tools.capture.mirror import mirror_capture

        return mirror_capture(self.address)


def _read_address(value: str | os.PathLike[str], ctx: click.Context | None) -> RemoteAddress | None:
    """Read an address; None if `value` is none, or if a shell completes the command line."""
    is_completion = ctx is not None and ctx.resilient_parsing
    if not isinstance(value, str) or not is_remote(value) or is_completion:
        return None
    return RemoteAddress.parse(value)

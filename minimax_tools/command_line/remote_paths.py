"""Types of options that take remote addresses beside folders: `s3://bucket/folder`, `hf://datasets/owner/name@revision`.

A command gets the path of a folder on this machine, whichever was given. No server is asked while options are read, so
a wrong command line is told at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from minimax_tools.command_line.console import LateValue, do_afterwards
from minimax_tools.ranks.rank_place import RankPlace
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


class OutputPath(click.Path):
    """The folder that a run is written to, or an address that it is put at once it is whole."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the placeholder in the help."""
        return _METAVAR

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the folder that `value` names; of an address, what finds a folder when the command runs.

        Raises:
            UsageError: It is an address that mm2 does not write.
        """
        address = _read_address(value, ctx)
        return super().convert(value, param, ctx) if address is None else _OutputThere(address)


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


@dataclass(frozen=True, slots=True)
class _OutputThere(LateValue):
    """A run that goes to an address."""

    address: RemoteAddress

    def find(self, ctx: click.Context) -> Path:
        """Return the folder in the cache that the run is written to. It is put at its address after the command.

        Of several ranks the first one asks, and puts what they all wrote.

        Raises:
            CannotRunError: There is no such bucket, or it cannot be read: a run of hours would be in vain.
        """
        from minimax_tools.capture.remote_output import RemoteOutput

        output = RemoteOutput.at(self.address)
        if RankPlace.from_environment().rank == 0:
            output.open()
            do_afterwards(ctx, lambda: output.put(overwrites=bool(ctx.params.get("overwrite"))))
        return output.directory


def _read_address(value: str | os.PathLike[str], ctx: click.Context | None) -> RemoteAddress | None:
    """Read an address; None if `value` is none, or if a shell completes the command line."""
    is_completion = ctx is not None and ctx.resilient_parsing
    if not isinstance(value, str) or not is_remote(value) or is_completion:
        return None
    return RemoteAddress.parse(value)

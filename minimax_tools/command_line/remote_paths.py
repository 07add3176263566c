"""Types of options that take remote addresses beside folders: `s3://bucket/folder`, `hf://datasets/owner/name@revision`.

A command gets the path of a folder on this machine, whichever was given.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click

from minimax_tools.capture.mirror import capture_folder
from minimax_tools.capture.remote_output import RemoteOutput
from minimax_tools.command_line.console import do_afterwards
from minimax_tools.ranks.rank_place import RankPlace
from minimax_tools.remote.address import RemoteAddress, is_remote

logger = logging.getLogger(__name__)


class CapturePath(click.Path):
    """The folder of a capture, or the address of one: its mirror's folder, whose files come when they are read."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)
        self.name = "folder|address"

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the folder that `value` names.

        Raises:
            UsageError: It is an address that mm2 does not read.
            CannotRunError: There is no capture at the address, or it cannot be read.
        """
        if isinstance(value, str) and is_remote(value) and not _is_completion(ctx):
            return capture_folder(value)
        return super().convert(value, param, ctx)


class OutputPath(click.Path):
    """The folder that a run is written to, or an address that it is put at once it is whole."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)
        self.name = "folder|address"

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the folder that `value` names, or one in the cache that is put at its address in the end.

        Raises:
            UsageError: It is an address that mm2 does not write.
            CannotRunError: There is no such bucket, or it cannot be read: a run of hours would be in vain.
        """
        if not (isinstance(value, str) and is_remote(value)) or _is_completion(ctx):
            return super().convert(value, param, ctx)
        output = RemoteOutput.open(RemoteAddress.parse(value))
        # Of several ranks the first one puts what they all wrote.
        if ctx is not None and RankPlace.from_environment().rank == 0:
            do_afterwards(ctx, lambda: output.put(overwrites=bool(ctx.params.get("overwrite"))))
        return output.directory


def _is_completion(ctx: click.Context | None) -> bool:
    """Decide whether a shell completes the command line: it must not wait for a server."""
    return ctx is not None and ctx.resilient_parsing

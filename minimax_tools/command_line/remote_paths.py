"""CapturePath: the type of options that take remote addresses beside folders: `s3://bucket/folder`.

A command gets the path of a folder on this machine, whichever was given. No server is asked while options are read, so
a wrong command line is told at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from minimax_tools.command_line.console import LateValue
from minimax_tools.remote.address import RemoteAddress, is_remote


class CapturePath(click.Path):
    """The folder of a capture, or the address of one: its mirror's folder, whose files come when they are read."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the placeholder in the help."""
        return "FOLDER|s3://…|hf://…"

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the folder that `value` names; of an address, what finds the folder when the command runs."""
        is_completion = ctx is not None and ctx.resilient_parsing
        if not isinstance(value, str) or not is_remote(value) or is_completion:
            return super().convert(value, param, ctx)
        address = RemoteAddress.parse(value)

        def find(_: click.Context) -> Path:
            from minimax_tools.capture.mirror import mirror_capture

            return mirror_capture(address)

        return LateValue(find)

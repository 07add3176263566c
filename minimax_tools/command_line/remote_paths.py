"""Types of options that take remote addresses beside folders: `s3://bucket/folder`, `hf://datasets/owner/name@revision`.

A command gets the path of a folder on this machine, whichever was given.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from minimax_tools.capture.mirror import mirror_capture
from minimax_tools.remote.address import RemoteAddress, is_remote


class CapturePath(click.Path):
    """The folder of a capture, or the address of one: its mirror's folder, whose files come when they are read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the folder that `value` names.

        Raises:
            UsageError: It is an address that mm2 does not read.
            CannotRunError: There is no capture at the address, or it cannot be read.
        """
        if isinstance(value, str) and is_remote(value):
            return mirror_capture(RemoteAddress.parse(value))
        return super().convert(value, param, ctx)

"""Types of options that take remote addresses beside folders: `s3://bucket/folder`, `hf://datasets/owner/name@revision`.

A command gets the path of a folder on this machine, whichever was given.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import click

from minimax_tools.capture.manifest import MANIFEST_NAME, Manifest
from minimax_tools.capture.mirror import OUTPUT_NAME, mirror_capture
from minimax_tools.command_line.console import do_afterwards
from minimax_tools.errors import UsageError
from minimax_tools.hub.dataset_folder import open_remote
from minimax_tools.hub.faults import NoRepositoryError
from minimax_tools.machine.whole_file import whole_file
from minimax_tools.ranks.rank_place import RankPlace
from minimax_tools.remote.address import RemoteAddress, is_remote
from minimax_tools.remote.cache import OUTPUTS, RemoteCache

logger = logging.getLogger(__name__)


class CapturePath(click.Path):
    """The folder of a capture, or the address of one: its mirror's folder, whose files come when they are read.

    Args:
        is_written: Whether the command writes into the capture: then it must be a folder.
    """

    def __init__(self, *, is_written: bool = False) -> None:
        super().__init__(path_type=Path)
        self._is_written = is_written
        self.name = "folder" if is_written else "folder|address"

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the folder that `value` names.

        Raises:
            UsageError: It is an address that mm2 does not read, or one that the command would write into.
            CannotRunError: There is no capture at the address, or it cannot be read.
        """
        if isinstance(value, str) and is_remote(value):
            if self._is_written:
                raise UsageError(
                    f"{value} is an address, and this command writes into the capture",
                    next_step="Name its folder on this machine, and publish it afterwards: mm2-gpu publish.",
                )
            return mirror_capture(RemoteAddress.parse(value))
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
        if not (isinstance(value, str) and is_remote(value)):
            return super().convert(value, param, ctx)
        address = RemoteAddress.parse(value)
        try:
            open_remote(address).find(MANIFEST_NAME)
        except NoRepositoryError:
            logger.info("%s is made when the run is put there.", address)
        directory = _output_folder(address)
        # Of several ranks the first one puts what they all wrote.
        if ctx is not None and RankPlace.from_environment().rank == 0:
            do_afterwards(ctx, lambda: _put_run(directory, address))
        return directory


def _output_folder(address: RemoteAddress) -> Path:
    """Make the folder in the cache for runs that go to an address, and return the one to write."""
    place = RemoteCache.from_environment().place(OUTPUTS, address, str(address))
    place.mkdir(parents=True, exist_ok=True)
    with whole_file(place / OUTPUT_NAME) as file:
        json.dump({"asked": str(address)}, file)
    return place / "run"


def _put_run(directory: Path, address: RemoteAddress) -> None:
    """Put a run at its address if it is whole; a killed run stays here, and goes on with the same command."""
    if (directory / MANIFEST_NAME).exists() and not Manifest.read(directory).is_complete:
        logger.warning("%s is not whole, and stays in %s.", address, directory)
        return
    files = {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
    if files:
        open_remote(address).put(files, last=MANIFEST_NAME)

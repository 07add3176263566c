"""LocalPath: the type of options that take files and folders of this machine alone.

pathlib makes `s3:/bucket` of `s3://bucket`: a run would go to a folder `s3:` of the working directory, unnoticed.
"""

from __future__ import annotations

import os
from typing import Any

import click

from minimax_tools.remote.address import is_remote


class LocalPath(click.Path):
    """A path that refuses remote addresses."""

    @classmethod
    def like(cls, path: click.Path) -> LocalPath:
        """Return a type that takes what another type of paths takes, but no address."""
        local = cls.__new__(cls)
        local.__dict__.update(path.__dict__)
        return local

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path.

        Raises:
            click.BadParameter: It is an address, or what `click.Path` refuses.
        """
        if isinstance(value, str) and is_remote(value):
            self.fail(f"{value!r} is an address: expected a path of this machine.", param, ctx)
        return super().convert(value, param, ctx)

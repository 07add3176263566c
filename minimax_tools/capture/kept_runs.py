"""The folder of a run that replaces no other finished run.

A finished capture is replaced by the same run alone, or where the user asks for it. An unfinished one has no result to
lose: it is resumed, or begun anew (see `resumption`).
"""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

from minimax_tools.capture.manifest import Description, Manifest
from minimax_tools.capture.store import MANIFEST_NAME, list_captures
from minimax_tools.errors import CaptureError

logger = logging.getLogger(__name__)


def refuse_other_run(directory: Path, description: Description) -> None:
    """Raise CaptureError if `directory` holds another finished capture than the one to write; name what differs."""
    if differing := differences_from_kept(directory, description):
        raise other_run_error(directory, differing)


def other_run_error(directory: Path, differing: list[str]) -> CaptureError:
    """Return the error of a finished capture that another one would replace."""
    return CaptureError(
        f"{directory} holds another finished capture",
        found=f"other {', '.join(differing)}",
        next_step="Add --overwrite to replace it, or name another folder with --output-dir.",
    )


def find_free_directory(directory: Path, description: Description) -> Path:
    """Return `directory`, or the first of `directory_2`, `directory_3` and so on that holds no other finished capture.

    A numbered folder that holds the same run goes before one that is free.
    """
    differing = differences_from_kept(directory, description)
    if not differing:
        return directory
    numbered = (directory.with_name(f"{directory.name}_{number}") for number in itertools.count(2))
    free = next(
        path
        for path in numbered
        if not path.exists()
        or ((path / MANIFEST_NAME).exists() and not differences_from_kept(path, description))
    )
    logger.info(
        "Writing into %s, since %s holds another run (other %s). Add --overwrite to replace that one.",
        free,
        directory,
        ", ".join(differing),
    )
    return free


def numbered_directories(directory: Path) -> list[Path]:
    """Return `directory` and its numbered neighbours that hold captures, the one that was written last first."""
    return [path for path in list_captures(directory.parent) if is_numbered(path, directory)]


def is_numbered(path: Path, directory: Path) -> bool:
    """Decide whether a path is `directory`, or one of its numbered neighbours."""
    number = path.name.removeprefix(f"{directory.name}_")
    return path == directory or (
        path.parent == directory.parent and number != path.name and number.isdecimal()
    )


def holds_same(directory: Path, description: Description) -> bool:
    """Decide whether `directory` holds the very capture to write, finished."""
    kept = read_kept(directory)
    return kept is not None and not kept.description.differences(description)


def differences_from_kept(directory: Path, description: Description) -> list[str]:
    """Return what differs between the finished capture in `directory` and one to write; [] if nothing is in the way."""
    kept = read_kept(directory)
    return [] if kept is None else kept.description.differences(description)


def read_kept(directory: Path) -> Manifest | None:
    """Return the manifest of the finished capture in `directory`; None if there is none that can be read."""
    try:
        manifest = Manifest.read(directory)
    except CaptureError:
        return None
    return manifest if manifest.is_complete else None

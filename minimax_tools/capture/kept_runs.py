"""The folder of a run that replaces no other finished run.

A finished capture is replaced by the same run alone, or where the user asks for it. An unfinished one has no result to
lose: it is resumed, or begun anew (see `resumption`).
"""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

from minimax_tools.capture.manifest import MANIFEST_NAME, Description, Manifest
from minimax_tools.errors import CaptureError

logger = logging.getLogger(__name__)

# Advice where a finished capture is in the way.
OTHER_PLACE = "Add --overwrite to replace it, or name another folder with --output-dir."


def refuse_other_run(directory: Path, description: Description) -> None:
    """Raise if `directory` holds another finished capture than the one to write.

    Raises:
        CaptureError: It does; the message names what differs.
    """
    differing = differences_from_kept(directory, description)
    if differing:
        raise other_run_error(directory, differing)


def other_run_error(directory: Path, differing: list[str]) -> CaptureError:
    """Return the error of a finished capture that another one would replace."""
    return CaptureError(
        f"{directory} holds another finished capture",
        found=f"other {', '.join(differing)}",
        next_step=OTHER_PLACE,
    )


def holds_certified(directory: Path, description: Description) -> bool:
    """Decide whether `directory` holds the very capture to write, finished and certified."""
    kept = read_kept(directory)
    return kept is not None and kept.is_certified and not kept.description.differences(description)


def find_free_directory(directory: Path, description: Description) -> Path:
    """Return `directory`, or the first of `directory_2`, `directory_3` and so on that holds no other finished capture.

    A numbered folder that holds the same run goes before one that is free.
    """
    numbered = (directory.with_name(f"{directory.name}_{number}") for number in itertools.count(2))
    if not _is_capture(directory) or not differences_from_kept(directory, description):
        return directory
    free = next(
        path
        for path in numbered
        if not path.exists() or (_is_capture(path) and not differences_from_kept(path, description))
    )
    logger.info(
        "Writing into %s, since %s holds another run (other %s). Add --overwrite to replace that one.",
        free,
        directory,
        ", ".join(differences_from_kept(directory, description)),
    )
    return free


def numbered_directories(directory: Path) -> list[Path]:
    """Return `directory` and its numbered neighbours that hold captures."""
    found = (manifest.parent for manifest in directory.parent.glob(f"{directory.name}*/{MANIFEST_NAME}"))
    return [path for path in found if is_numbered(path, directory)]


def is_numbered(path: Path, directory: Path) -> bool:
    """Decide whether a path is `directory`, or one of its numbered neighbours."""
    number = path.name.removeprefix(f"{directory.name}_")
    return path == directory or (
        path.parent == directory.parent and number != path.name and number.isdecimal()
    )


def differences_from_kept(directory: Path, description: Description) -> list[str]:
    """Return what differs between the finished capture in `directory` and one to write; [] if nothing is in the way."""
    kept = read_kept(directory)
    return [] if kept is None else kept.description.differences(description)


def read_kept(directory: Path) -> Manifest | None:
    """Return the manifest of the finished capture in `directory`; None if there is none."""
    if not _is_capture(directory):
        return None
    try:
        manifest = Manifest.read(directory)
    except CaptureError:
        return None  # damaged: there is nothing to keep
    return manifest if manifest.is_complete else None


def _is_capture(directory: Path) -> bool:
    return (directory / MANIFEST_NAME).exists()

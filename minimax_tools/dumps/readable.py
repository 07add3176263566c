"""Refusal of a dump with files that cannot be reached: a site that lies in one is not a site that the port hides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from minimax_tools.errors import CaptureError, list_faults

_TENSOR_SUFFIXES = (".pt", ".pth", ".npy", ".safetensors")


def refuse_unreadable(directory: Path) -> None:
    """Check that each folder below a directory can be listed, and each link and tensor file opened.

    Raises:
        CaptureError: Some cannot; each is named with the reason.
    """
    faults = list(_find_faults(directory))
    if faults:
        raise CaptureError(
            f"{directory} cannot be read whole",
            found=list_faults(faults),
            next_step="Mend the access to these, or copy them again from the host that wrote them.",
        )


def _find_faults(folder: Path) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield _word(folder, error)
        return
    for entry in entries:
        path = Path(entry.path)
        is_link = entry.is_symlink()
        try:
            # Also of a link, which may lead nowhere, or in a circle.
            is_folder = path.stat() is not None and path.is_dir()
            if not is_folder and path.suffix in _TENSOR_SUFFIXES:
                path.open("rb").close()
        except OSError as error:
            yield _word(path, error)
            continue
        if is_folder and path.suffix in _TENSOR_SUFFIXES:
            yield f"{path}: a folder in place of a file"
        # A link may lead above itself.
        elif is_folder and not is_link:
            yield from _find_faults(path)


def _word(path: Path, error: OSError) -> str:
    link = f" (a link to {path.readlink()})" if path.is_symlink() else ""
    return f"{path}{link}: {error.strerror}"

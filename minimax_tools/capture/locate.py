"""Opening a capture: whoever wrote it, the directory's own files decide how it is read."""

from __future__ import annotations

from pathlib import Path

from minimax_tools.capture.legacy import LegacyCapture
from minimax_tools.capture.legacy_layout import LEGACY_LAYOUT
from minimax_tools.capture.manifest import MANIFEST_NAME
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import CaptureError

_MAX_NAMED = 5


def open_source(directory: Path) -> CaptureSource:
    """Open a capture directory: mm2's own, or one of `.pt` files.

    Raises:
        CaptureError: The directory is not there, holds neither, or what it holds is damaged.
    """
    if not directory.is_dir():
        raise CaptureError(
            f"there is no capture directory {directory}",
            found="a file" if directory.exists() else None,
            next_step="Check the path, or make one: mm2-gpu extract-all --model DIR (golden), "
            "mm2-test sweep (device run).",
        )
    if (directory / MANIFEST_NAME).exists():
        return Capture.open(directory)
    if LegacyCapture.recognises(directory):
        return LegacyCapture.open(directory)
    raise CaptureError(
        f"no capture at {directory}",
        expected=f"{MANIFEST_NAME}, or {LEGACY_LAYOUT}",
        found=_listed(sorted(path.name for path in directory.iterdir())) or "an empty directory",
        next_step=_next_step(directory),
    )


def _next_step(directory: Path) -> str:
    """Captures usually lie one folder further down: name those."""
    below = sorted(
        path.name
        for path in directory.iterdir()
        if path.is_dir() and ((path / MANIFEST_NAME).exists() or LegacyCapture.recognises(path))
    )
    if below:
        return f"Name one of the captures in it: {_listed(below)}."
    return "Make one: mm2-gpu extract-all --model DIR (golden), mm2-test sweep (device run)."


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    return f"{shown} and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else shown

"""Port source: tells whether a port's file has changed since its run, without executing it."""

from __future__ import annotations

from pathlib import Path

from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.provenance import digest_sources


def has_changed(run: CaptureSource) -> bool:
    """Decide whether the file of a run's port has changed since the run.

    False if it cannot be told: the port is no file, or lies elsewhere, or mm2 did not make the run. The digest of a run
    covers the modules that the port imports too, which are not known here. So a file with another digest counts as
    changed only if it is also newer than the run.
    """
    description = run.known_description
    if description is None or not description.provenance.target_digest:
        return False
    file = Path(description.provenance.target.rpartition(":")[0])
    if file.suffix != ".py" or not file.is_file():
        return False
    if digest_sources({file.name: file}) == description.provenance.target_digest:
        return False
    return file.stat().st_mtime > (run.directory / MANIFEST_NAME).stat().st_mtime

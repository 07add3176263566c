"""CaptureStore: the place of a run's capture, as --captures, --output-dir and --overwrite name it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minimax_tools.capture.store import DEVICE_SIDE, capture_directory

if TYPE_CHECKING:
    from minimax_tools.capture.manifest import Description


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStore:
    """The place of a run's capture, as the user chose it."""

    captures: Path  # folder of all captures
    output_dir: Path | None = None  # capture directory of this run; None for a directory under `captures`
    overwrite: bool = False  # whether the run may replace another one

    def directory(self, side: str, run_name: str) -> Path:
        """Return the capture directory of a run of one side."""
        return self.output_dir or capture_directory(self.captures, side, run_name)

    def saved(self, side: str, run_name: str) -> Path:
        """Return the directory of a saved run: of its numbered folders the one that was written last.

        Of a run at an address, it is the mirror.
        """
        from minimax_tools.capture.kept_runs import numbered_directories
        from minimax_tools.capture.remote_output import kept_directory

        directory = self.directory(side, run_name)
        if self.output_dir is not None:
            return kept_directory(directory)
        saved = numbered_directories(directory)
        return saved[0] if saved else directory

    def place_run(self, run_name: str, description: Description) -> Path:
        """Return the directory for a port's run, which replaces no other run unless the user asked for that.

        If another run has the usual place, it is a numbered folder beside it.

        Raises:
            CaptureError: The directory that the user named holds another finished capture.
        """
        from minimax_tools.capture.kept_runs import find_free_directory, refuse_other_run

        directory = self.directory(DEVICE_SIDE, run_name)
        if self.overwrite:
            return directory
        if self.output_dir is None:
            return find_free_directory(directory, description)
        refuse_other_run(directory, description)
        return directory

"""Sharing: what one rank sees of a capture directory that another machine writes.

A network file system shows the files of another machine late: NFS keeps for up to a minute that a name was not
there. So what must be there is waited for, and known by more than its name: the run's lock by its owner, a tensor by
its digest.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from minimax_tools.capture.manifest import Entry, Manifest
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CaptureError
from minimax_tools.machine.folder_lock import read_owner

# NFS trusts what it knows of a directory for a minute at most, unless it is mounted otherwise.
SETTLING_S = 75.0
_POLL_S = 0.25


def require_shared(directory: Path, owner: str, *, patience_s: float = SETTLING_S) -> None:
    """Pass when `directory` is seen to be the one that the run of this owner writes in.

    Raises:
        CaptureError: It is another one, or none.
    """
    deadline = time.monotonic() + patience_s
    while (found := read_owner(directory)) != owner:
        if time.monotonic() > deadline:
            raise CaptureError(
                f"{directory} is not the directory that rank 0 opened",
                expected="the lock of this run in it",
                found="none" if found is None else "that of another",
                next_step="Give --output-dir a folder on a file system that all machines share.",
            )
        time.sleep(_POLL_S)


def refuse_other_owner(directory: Path, owner: str) -> None:
    """Pass unless another run took the directory over since.

    Raises:
        CaptureError: One did.
    """
    found = read_owner(directory)
    if found not in (owner, None):
        raise CaptureError(
            f"another run writes in {directory} now", next_step="Nothing: this one ended when its rank 0 did."
        )


def read_shared(
    directory: Path, manifest: Manifest, entry: Entry, *, patience_s: float = SETTLING_S
) -> torch.Tensor:
    """The tensor of an entry that another rank wrote, its digest verified.

    Args:
        directory: The capture directory.
        manifest: The capture's.
        entry: The tensor's.
        patience_s: How long to wait until it shows.

    Raises:
        CaptureError: It did not show.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return Capture(directory, manifest).read_entry(entry)
        except CaptureError as error:
            found = str(error)
        if time.monotonic() > deadline:
            raise CaptureError(
                f"{entry.site} of layer {entry.layer} does not show in {directory}, where another rank wrote it",
                found=found,
                next_step="Check that all machines see the same folder, and run the same command again.",
            )
        time.sleep(_POLL_S)

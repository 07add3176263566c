"""Shared files: files of a capture directory that a process on another machine wrote, waited for until they show.

A network file system may show a new file late, or an old file under a name that was written anew. So a file is known
by its content: a lock by its owner, a tensor by its digest. Wrong content is waited out like a missing file, because
no reader can tell a damaged file from an old one that its machine still shows.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from minimax_tools.capture.manifest import Entry, Manifest
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CaptureError
from minimax_tools.machine.folder_lock import read_owner

# Longest wait, in seconds: NFS keeps what it knows of a folder for at most 60 s by default (`acdirmax`), and a margin.
SETTLING_S = 75.0
POLL_S = 0.25


def wait_for_lock(directory: Path, owner: str, *, patience_s: float = SETTLING_S) -> None:
    """Wait until `directory` shows the lock of this run, named `owner`; at most `patience_s` seconds.

    Raises:
        CaptureError: After this time the directory holds the lock of another run, or none.
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
        time.sleep(POLL_S)


def refuse_other_owner(directory: Path, owner: str) -> None:
    """Raise if another run has taken the directory over; a missing lock may only not show, so it does not count.

    Raises:
        CaptureError: The directory holds the lock of another run.
    """
    found = read_owner(directory)
    if found not in (owner, None):
        raise CaptureError(
            f"another run writes in {directory} now", next_step="Nothing: this one ended when its rank 0 did."
        )


def read_shared(
    directory: Path, manifest: Manifest, entry: Entry, *, patience_s: float = SETTLING_S
) -> torch.Tensor:
    """Read the tensor of an entry that another rank wrote, once its file shows; wait at most `patience_s` seconds.

    Raises:
        CaptureError: The file did not show in time, or has another digest.
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
        time.sleep(POLL_S)

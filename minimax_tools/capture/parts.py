"""Parts: manifests of the ranks that write one capture directory together, and files that other machines wrote.

Each rank lists its tensors in a manifest of its own, so no rank waits for another. A killed rank has listed all that
it finished, and a later run resumes from there. When all ranks are done, they send rank 0 their manifests to merge:
a network file system may show the files of another machine late. NFS may say for up to a minute that a file is not
there. So a shared file is waited for, and identified by content: a lock by its owner, a tensor by its digest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from minimax_tools.capture.digests import FileDigests
from minimax_tools.capture.manifest import MANIFEST_NAME, Entry, Manifest
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CaptureError
from minimax_tools.machine.folder_lock import read_owner

_STEM, _SUFFIX = MANIFEST_NAME.split(".")


def part_name(rank: int) -> str:
    """Return the file name of a rank's manifest; rank 0 writes the capture's own."""
    return f"{_STEM}.rank{rank}.{_SUFFIX}" if rank else MANIFEST_NAME


def merge_parts(directory: Path, manifest: Manifest) -> Manifest:
    """Add to a capture's manifest the layers that parts beside it list.

    Parts that are damaged or belong to another capture are left out.
    """
    for path in _parts(directory):
        try:
            part = Manifest.read(directory, name=path.name)
        except CaptureError:
            continue
        if not part.description.differences(manifest.description):
            manifest = manifest_with(manifest, part)
    return manifest


def manifest_with(manifest: Manifest, part: Manifest) -> Manifest:
    """Add to a manifest what a part of the same capture lists beyond it."""
    listed = {(entry.layer, entry.site) for entry in manifest.entries}
    new = [entry for entry in part.entries if (entry.layer, entry.site) not in listed]
    model = tuple(entry for entry in new if entry.layer is None)
    merged = manifest
    if model:
        own = tuple(entry for entry in manifest.entries if entry.layer is None)
        merged = manifest.with_model((*own, *model), _digests_of(part, "model"))
    for layer in part.complete_layers:
        if layer not in merged.complete_layers:
            entries = tuple(entry for entry in new if entry.layer == layer)
            merged = merged.with_layer(
                layer,
                entries,
                not_exposed=part.not_exposed.get(layer, ()),
                observed_dtypes={},
                digests=_digests_of(part, f"layer_{layer}"),
            )
    return replace(merged, observed_dtypes={**part.observed_dtypes, **manifest.observed_dtypes})


def remove_parts(directory: Path) -> None:
    """Remove the parts, once the capture's own manifest holds them."""
    for path in _parts(directory):
        path.unlink()


def _digests_of(part: Manifest, group: str) -> tuple[FileDigests, ...]:
    return () if part.digests is None else part.digests.of_group(group)


def _parts(directory: Path) -> Iterator[Path]:
    return iter(sorted(directory.glob(f"{_STEM}.rank*.{_SUFFIX}")))


# NFS caches a directory for a minute at most by default.
SETTLING_S = 75.0
_POLL_S = 0.25


def require_shared(directory: Path, owner: str, *, patience_s: float = SETTLING_S) -> None:
    """Wait until `directory` shows the lock of this run.

    Args:
        directory: The capture directory.
        owner: Owner of the run's lock.
        patience_s: Longest time to wait, in seconds.

    Raises:
        CaptureError: The directory holds the lock of another run, or none.
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
    """Raise if another run has taken the directory over.

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
    """Read the tensor of an entry that another rank wrote, and check its digest.

    Args:
        directory: The capture directory.
        manifest: The capture's manifest.
        entry: The tensor's entry.
        patience_s: Longest time to wait for the file, in seconds.

    Raises:
        CaptureError: The file did not show in time.
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

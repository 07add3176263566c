"""Parts: the manifests that the ranks of a run keep beside the capture's own, for a run that resumes theirs.

All ranks write their layers' tensors into one capture directory, but each lists them in a manifest of its own, so
that nobody waits for anybody and whoever is killed has listed what it finished. What rank 0 merges when all are done
it is told by the ranks themselves: a file of another machine may be seen late.
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
    """The name of a rank's manifest; rank 0 writes the capture's own."""
    return f"{_STEM}.rank{rank}.{_SUFFIX}" if rank else MANIFEST_NAME


def merge_parts(directory: Path, manifest: Manifest) -> Manifest:
    """A capture's manifest with what the parts beside it list; those of another capture, or damaged, do not count.

    Args:
        directory: The capture directory.
        manifest: The capture's own.
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
    """A manifest with what a part of the same capture lists beyond it."""
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
    """Remove the parts: the capture's own manifest holds them."""
    for path in _parts(directory):
        path.unlink()


def _digests_of(part: Manifest, group: str) -> tuple[FileDigests, ...]:
    return () if part.digests is None else part.digests.of_group(group)


def _parts(directory: Path) -> Iterator[Path]:
    return iter(sorted(directory.glob(f"{_STEM}.rank*.{_SUFFIX}")))


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

"""Parts: the manifests that the ranks of a run keep beside the capture's own, for a run that resumes theirs.

All ranks write their layers' tensors into one capture directory, but each lists them in a manifest of its own, so
that nobody waits for anybody and whoever is killed has listed what it finished. What rank 0 merges when all are done
it is told by the ranks themselves: a file of another machine may be seen late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from minimax_tools.capture.digests import FileDigests
from minimax_tools.capture.manifest import MANIFEST_NAME, Manifest
from minimax_tools.errors import CaptureError

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

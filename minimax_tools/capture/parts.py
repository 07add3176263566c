"""Parts: manifests of the ranks that write one capture directory together.

Each rank lists its tensors in a manifest of its own, its part, so no rank waits for another. When all ranks are done,
they send rank 0 their parts to merge. If a rank is killed before, its part's file lists the layers that it finished,
and a later run resumes from there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from minimax_tools.capture.digests import FileDigests
from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import CaptureError

_STEM, _SUFFIX = MANIFEST_NAME.split(".")


def part_name(rank: int) -> str:
    """Return the file name of a rank's manifest; rank 0 writes the capture's own."""
    return f"{_STEM}.rank{rank}.{_SUFFIX}" if rank else MANIFEST_NAME


def merge_parts(directory: Path, manifest: Manifest) -> Manifest:
    """Add to a capture's manifest the tensors that the parts beside it list.

    Parts that are damaged or belong to another capture are left out: their layers are computed again.
    """
    for path in _part_files(directory):
        try:
            part = Manifest.read(directory, name=path.name)
        except CaptureError:
            continue
        if not part.description.differences(manifest.description):
            manifest = add_part(manifest, part)
    return manifest


def add_part(manifest: Manifest, part: Manifest) -> Manifest:
    """Add to a manifest the layers, and the sites outside the layers, that only a part of the same capture lists."""
    listed = {(entry.layer, entry.site) for entry in manifest.entries}
    new = [entry for entry in part.entries if (entry.layer, entry.site) not in listed]
    merged = manifest
    new_model_entries = [entry for entry in new if entry.layer is None]
    if new_model_entries:
        model_entries = [entry for entry in manifest.entries if entry.layer is None]
        merged = manifest.with_model((*model_entries, *new_model_entries), _digests_of(part, "model"))
    for layer in part.complete_layers:
        if layer not in merged.complete_layers:
            merged = merged.with_layer(
                layer,
                tuple(entry for entry in new if entry.layer == layer),
                not_exposed=part.not_exposed.get(layer, ()),
                num_calls=part.num_calls.get(layer, {}),
                observed_dtypes={},
                digests=_digests_of(part, f"layer_{layer}"),
                unreached_experts=part.unreached_experts.get(layer),
            )
    # The dtypes that the manifest has already stay.
    return replace(merged, observed_dtypes={**part.observed_dtypes, **manifest.observed_dtypes})


def remove_parts(directory: Path) -> None:
    """Remove the parts, once the capture's own manifest holds them."""
    for path in _part_files(directory):
        path.unlink()


def _part_files(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"{_STEM}.rank*.{_SUFFIX}"))


def _digests_of(part: Manifest, group: str) -> tuple[FileDigests, ...]:
    return () if part.digests is None else part.digests.of_group(group)

"""Resumption: a killed run's capture, resumed or removed; manifests of the ranks that write one capture together.

Each rank lists its tensors in a manifest of its own, its part. When all are done, they send rank 0 their parts to
merge. If a rank is killed before, its part's file lists the layers that it finished, and a later run resumes from
there.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from minimax_tools.capture.manifest import OF_LAYER, Description, FileDigests, Manifest
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.capture.store import MANIFEST_NAME, group_name, list_captures
from minimax_tools.errors import CaptureError
from minimax_tools.machine.files import LOCK_NAME, is_temporary
from minimax_tools.model.sites import Site

logger = logging.getLogger(__name__)
_STEM, _SUFFIX = MANIFEST_NAME.split(".")
# The first layer's input [B,S,H], or a function that computes it; None if the tokens make it.
HiddenStates = torch.Tensor | Callable[[], torch.Tensor] | None


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
    merged = manifest
    for layer in (None, *part.complete_layers):
        new = [entry for entry in part.entries if entry.layer == layer and (layer, entry.site) not in listed]
        if layer in merged.complete_layers or (layer is None and not new):
            continue
        merged = merged.with_layer(
            layer,
            (*(entry for entry in manifest.entries if entry.layer == layer), *new),
            digests=_digests_of(part, layer),
            **{name: getattr(part, name).get(layer) for name in OF_LAYER},
        )
    # The dtypes that the manifest has already stay.
    return replace(merged, observed_dtypes={**part.observed_dtypes, **manifest.observed_dtypes})


def _digests_of(part: Manifest, layer: int | None) -> FileDigests:
    """Return the digests of the files of a layer, or of the sites outside the layers."""
    beginning = f"{group_name(layer)}."
    return {file: digests for file, digests in part.digests.items() if file.startswith(beginning)}


def remove_parts(directory: Path) -> None:
    """Remove the parts, once the capture's own manifest holds them."""
    for path in _part_files(directory):
        path.unlink()


def _part_files(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"{_STEM}.rank*.{_SUFFIX}"))


def find_resumable(
    directory: Path, description: Description, *, hidden_states: HiddenStates
) -> Manifest | None:
    """Return the manifest to resume from; None if there is none, or if it must be begun anew: that reason is logged.

    `hidden_states` are the first layer's input. A function is not called, because computing may be long: the capture's
    stored hidden states must then equal its stored input of the first layer.
    """
    if not (directory / MANIFEST_NAME).exists():
        return None
    try:
        # Merged, as each of several ranks lists its layers in a manifest of its own.
        manifest = merge_parts(directory, Manifest.read(directory))
    except CaptureError as error:
        logger.warning("Starting anew in %s: %s", directory, error)
        return None
    reason = _obstacle(directory, manifest, description, hidden_states)
    if reason is not None:
        logger.info("Starting anew in %s: %s.", directory, reason)
        return None
    if manifest.complete_layers:
        logger.info("Resuming %s after layer %d.", directory, max(manifest.complete_layers))
    return manifest


def clear_capture(directory: Path) -> None:
    """Remove the capture in `directory`, if there is one.

    Raises:
        CaptureError: The directory holds other files; they are left alone.
    """
    present = [path for path in directory.iterdir() if path.name != LOCK_NAME and not is_temporary(path)]
    if not present:
        return
    if not Manifest.is_in(directory):
        raise CaptureError(
            f"{directory} is not empty and holds no capture",
            found=", ".join(sorted(path.name for path in present)[:3]),
            next_step="Choose another --output-dir.",
        )
    # The manifest goes last (False sorts before True): a run killed here leaves a directory known as a capture.
    for path in sorted(present, key=lambda path: path.name == MANIFEST_NAME):
        # Folders, such as `read_records`, and files of other kinds stay.
        if path.is_file() and path.suffix in (".safetensors", ".json"):
            path.unlink()


def _obstacle(
    directory: Path, manifest: Manifest, description: Description, hidden_states: HiddenStates
) -> str | None:
    """Return the reason why the capture there cannot be resumed; None if it can."""
    differing = manifest.description.differences(description)
    if differing:
        return f"the capture there has other {', '.join(differing)}"
    if manifest.is_complete:
        return "the same capture is there, complete"
    capture = Capture(directory, manifest)
    if manifest.complete_layers and not _has_input(capture, hidden_states):
        return "the capture there began with other hidden states"
    # The resumed run writes the inputs again.
    if inspect_capture(capture, with_inputs=False).faults:
        return "a stored tensor does not match its digest"
    return None


def _has_input(capture: Capture, hidden_states: HiddenStates) -> bool:
    """Decide whether a capture began with these hidden states; for a function see `find_resumable`."""
    try:
        stored = capture.read_hidden_states()
        if callable(hidden_states):
            hidden_states = capture.read(capture.description.run.span.start, Site.INPUT)
    except CaptureError:
        return False
    if stored is None or hidden_states is None:
        return stored is None and hidden_states is None
    return stored.dtype == hidden_states.dtype and torch.equal(stored, hidden_states.cpu())


def refuse_other_run(directory: Path, description: Description) -> None:
    """Raise CaptureError if `directory` holds another finished capture than the one to write; name what differs."""
    if differing := differences_from_kept(directory, description):
        raise other_run_error(directory, differing)


def other_run_error(directory: Path, differing: list[str]) -> CaptureError:
    """Return the error of a finished capture that another one would replace."""
    return CaptureError(
        f"{directory} holds another finished capture",
        found=f"other {', '.join(differing)}",
        next_step="Add --overwrite to replace it, or name another folder with --output-dir.",
    )


def find_free_directory(directory: Path, description: Description) -> Path:
    """Return `directory`, or the first of `directory_2`, `directory_3` and so on that holds no other finished capture.

    A numbered folder that holds the same run goes before one that is free.
    """
    differing = differences_from_kept(directory, description)
    if not differing:
        return directory
    numbered = (directory.with_name(f"{directory.name}_{number}") for number in itertools.count(2))
    free = next(
        path
        for path in numbered
        if not path.exists()
        or ((path / MANIFEST_NAME).exists() and not differences_from_kept(path, description))
    )
    logger.info(
        "Writing into %s, since %s holds another run (other %s). Add --overwrite to replace that one.",
        free,
        directory,
        ", ".join(differing),
    )
    return free


def numbered_directories(directory: Path) -> list[Path]:
    """Return `directory` and its numbered neighbours that hold captures, the one that was written last first."""
    return [path for path in list_captures(directory.parent) if is_numbered(path, directory)]


def is_numbered(path: Path, directory: Path) -> bool:
    """Decide whether a path is `directory`, or one of its numbered neighbours."""
    number = path.name.removeprefix(f"{directory.name}_")
    return path == directory or (
        path.parent == directory.parent and number != path.name and number.isdecimal()
    )


def holds_same(directory: Path, description: Description) -> bool:
    """Decide whether `directory` holds the very capture to write, finished."""
    kept = read_kept(directory)
    return kept is not None and not kept.description.differences(description)


def differences_from_kept(directory: Path, description: Description) -> list[str]:
    """Return what differs between the finished capture in `directory` and one to write; [] if nothing is in the way."""
    kept = read_kept(directory)
    return [] if kept is None else kept.description.differences(description)


def read_kept(directory: Path) -> Manifest | None:
    """Return the manifest of the finished capture in `directory`; None if there is none that can be read."""
    try:
        manifest = Manifest.read(directory)
    except CaptureError:
        return None
    return manifest if manifest.is_complete else None

"""An index file's weight_map (tensor → file): read, made from headers, and checked against them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import read_weight_map
from minimax_tools.errors import CheckpointError, list_faults

_NUM_NAMES_SHOWN = 12


def read_index_json(path: Path) -> dict[str, Any]:
    """The index file's content: `weight_map` maps tensors to plain file names, `metadata` is a dict.

    Raises:
        CheckpointError: The file is missing or damaged, or its weight_map is not such a mapping.
    """
    weight_map = read_weight_map(path)
    index_json = json.loads(path.read_text(encoding="utf-8"))
    strange = sorted({repr(file) for file in weight_map.values() if not _is_plain(file)})
    if strange:
        raise CheckpointError(
            f"{path} names files that do not lie beside it",
            found=", ".join(strange[:_NUM_NAMES_SHOWN]),
            next_step="Fetch the file again from a source that you trust.",
        )
    # Some tools write null there.
    return {**index_json, "metadata": index_json.get("metadata") or {}}


def weight_map_of(headers: Iterable[TensorEntry], *, folder: Path) -> dict[str, str]:
    """The weight_map that the headers of a checkpoint's files amount to.

    Raises:
        CheckpointError: A tensor lies in two files, or there is none at all.
    """
    weight_map: dict[str, str] = {}
    faults = []
    for entry in headers:
        first = weight_map.setdefault(entry.name, entry.file.name)
        if first != entry.file.name:
            faults.append(f"{entry.name} is both in {first} and in {entry.file.name}")
    if not weight_map:
        faults.append("its files hold no tensor")
    if faults:
        raise faulty_checkpoint(folder, faults)
    return weight_map


def contradictions(weight_map: Mapping[str, str], headers: Mapping[str, Iterable[TensorEntry]]) -> list[str]:
    """One sentence for each tensor on which the index and a file's header disagree.

    Args:
        weight_map: What the index says.
        headers: The headers that were read, by file name; files that are not here are not judged.
    """
    faults = []
    for file, header in headers.items():
        names = {entry.name for entry in header}
        claimed = {name for name, place in weight_map.items() if place == file}
        faults += [
            f"the index places {name} in {file}, whose header lacks it" for name in sorted(claimed - names)
        ]
        for name in sorted(names - claimed):
            place = weight_map.get(name)
            says = f"places it in {place}" if place else "lacks it"
            faults.append(f"{file} holds {name}, the index {says}")
    return faults


def faulty_checkpoint(folder: Path, faults: list[str]) -> CheckpointError:
    """The error that lists the faults of a checkpoint, as many as a reader can take in."""
    return CheckpointError(
        f"the checkpoint at {folder} has {len(faults)} fault{'s' if len(faults) > 1 else ''}",
        found=list_faults(faults),
        next_step="Fetch the named files again; if only the index is wrong, fetch or remove that.",
    )


def _is_plain(file: Any) -> bool:
    # An index comes from elsewhere: it must not lead out of the checkpoint.
    return isinstance(file, str) and file not in ("", ".", "..") and file == PurePosixPath(file).name

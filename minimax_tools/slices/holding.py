"""Holding: the tensors of a node, as planned or as found in its slice's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minimax_tools.errors import CheckpointError
from minimax_tools.partition.plan import Slice
from minimax_tools.slices.description import SliceDescription
from minimax_tools.slices.digest import describe_shape, digest_tensors
from minimax_tools.slices.folder import read_slice_folder

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pth", ".pt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The tensors of a node, by name."""

    node: str  # name of the node
    # Folder of its slice; None if the tensors are only planned. Then the fields below, except `sizes`, are empty.
    folder: Path | None = None
    source: str | None = None  # the checkpoint that the slice was cut from, by its slice.json
    sizes: Mapping[str, int] = field(default_factory=dict, repr=False)  # bytes of each tensor
    files: tuple[str, ...] = ()  # names of the weight files in the folder, sorted
    # Dtype and shape of each tensor, in words.
    shapes: Mapping[str, str] = field(default_factory=dict, repr=False)
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)  # sha256 of each tensor
    # sha256 of each tensor as slice.json notes it; None for a tensor without one there.
    noted: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    faults: tuple[str, ...] = ()  # reasons why the folder cannot be read, or is not the node's

    @classmethod
    def planned(cls, slice_: Slice, sizes: Mapping[str, int]) -> Holding:
        """Build the holding of a node's slice as planned, with the sizes of its tensors in bytes."""
        return cls(node=slice_.node.name, sizes={name: sizes.get(name, 0) for name in slice_.names})

    @classmethod
    def found(cls, slice_: Slice, folder: Path) -> Holding:
        """Read every byte of a node's folder; if it cannot be read, that is a fault of the holding."""
        node = slice_.node.name
        if not folder.is_dir():
            # An idle node needs no folder.
            return cls(node=node, folder=folder, faults=(f"{folder} is not there",) if slice_.tensors else ())
        try:
            return _read_folder(slice_, folder)
        except CheckpointError as error:
            return cls(node=node, folder=folder, faults=(str(error),))

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes.values())

    @property
    def digest(self) -> str:
        """sha256 over the names and digests of all tensors that were found."""
        lines = (f"{name} {digest}\n" for name, digest in sorted(self.digests.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def _read_folder(slice_: Slice, folder: Path) -> Holding:
    description = SliceDescription.read(folder)
    index = read_slice_folder(folder)
    digests = dict(digest_tensors(tuple(index.entries.values()), index))
    files = tuple(file.name for file in index.files)
    # Weight files that the slice's index does not name.
    stray = sorted(
        path.name for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.name not in files
    )
    return Holding(
        node=slice_.node.name,
        folder=folder,
        source=description.source,
        sizes={name: entry.size_bytes for name, entry in index.entries.items()},
        files=files,
        shapes={name: describe_shape(entry) for name, entry in index.entries.items()},
        digests=digests,
        noted=description.tensors,
        faults=(
            *_find_contradictions(slice_, description),
            *(f"{name} lies in {folder}, but belongs to no slice" for name in stray),
        ),
    )


def _find_contradictions(slice_: Slice, description: SliceDescription) -> list[str]:
    """Describe the contradictions between a folder's slice.json and the plan."""
    stage = slice_.stage
    parts = (
        ("node", slice_.node.name, description.node),
        ("layers", stage.layers, description.layers),
        ("embedding", stage.has_embedding, description.has_embedding),
        ("head", stage.has_head, description.has_head),
    )
    return [
        f"slice.json says of its {part}: {found}, the plan: {planned}"
        for part, planned, found in parts
        # A slice of tensors chosen by name has no layers in its slice.json.
        if found is not None and planned != found
    ]

"""Holding: the tensors a node has, as planned or as its slice's folder holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minimax_tools.errors import CheckpointError
from minimax_tools.partition.plan import Slice
from minimax_tools.slices.description import SliceDescription
from minimax_tools.slices.digest import digest_tensor, word_shape
from minimax_tools.slices.folder import open_slice

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pth", ".pt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a node holds.

    Args:
        node: Its name.
        folder: Of its slice; None where it is only planned.
        source: What the folder was cut from, as it says itself.
        sizes: Bytes by tensor.
        files: The weight files in the folder, sorted.
        shapes: Dtype and shape of each tensor that was found, in words.
        digests: sha256 of each tensor that was found.
        noted: The digests that the slice's own slice.json notes.
        faults: Why the folder cannot be read, or is not the node's.
    """

    node: str
    folder: Path | None = None
    source: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict, repr=False)
    files: tuple[str, ...] = ()
    shapes: Mapping[str, str] = field(default_factory=dict, repr=False)
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    noted: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    faults: tuple[str, ...] = ()

    @classmethod
    def planned(cls, slice_: Slice, sizes: Mapping[str, int]) -> Holding:
        """What a node is to hold.

        Args:
            slice_: Its slice.
            sizes: Bytes of its tensors.
        """
        return cls(node=slice_.node.name, sizes={name: sizes.get(name, 0) for name in slice_.names})

    @classmethod
    def found(cls, slice_: Slice, folder: Path) -> Holding:
        """What a node's folder holds, every byte of it read; a folder that cannot be read is a fault."""
        node = slice_.node.name
        if not folder.is_dir():
            return cls(node=node, folder=folder, faults=(f"{folder} is not there",) if slice_.tensors else ())
        try:
            description = SliceDescription.read(folder)
            return _read_folder(node, folder, description, _own_faults(slice_, description))
        except CheckpointError as error:
            return cls(node=node, folder=folder, faults=(str(error),))

    @property
    def size_bytes(self) -> int:
        """Of all its tensors."""
        return sum(self.sizes.values())

    @property
    def digest(self) -> str:
        """sha256 over the names and digests of all tensors that were found: two slices that agree in it are one."""
        lines = (f"{name} {digest}\n" for name, digest in sorted(self.digests.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def _read_folder(node: str, folder: Path, description: SliceDescription, faults: tuple[str, ...]) -> Holding:
    with open_slice(folder) as reader:
        entries = reader.index.entries
        digests = {name: digest_tensor(reader, entry) for name, entry in entries.items()}
        files = tuple(file.name for file in reader.index.files)
    stray = sorted(
        path.name for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.name not in files
    )
    return Holding(
        node=node,
        folder=folder,
        source=description.source,
        sizes={name: entry.size_bytes for name, entry in entries.items()},
        files=files,
        shapes={name: word_shape(entry) for name, entry in entries.items()},
        digests=digests,
        noted=description.tensors,
        faults=(*faults, *(f"{name} lies in {folder}, and belongs to no slice" for name in stray)),
    )


def _own_faults(slice_: Slice, description: SliceDescription) -> tuple[str, ...]:
    """Where the folder's description contradicts the plan."""
    stage = slice_.stage
    pairs = (
        ("node", slice_.node.name, description.node),
        ("layers", stage.layers, description.layers),
        ("embedding", stage.has_embedding, description.has_embedding),
        ("head", stage.has_head, description.has_head),
    )
    return tuple(
        f"slice.json says of its {what}: {found}, the plan: {planned}"
        for what, planned, found in pairs
        # Tensors that were chosen one by one say nothing of layers.
        if found is not None and planned != found
    )

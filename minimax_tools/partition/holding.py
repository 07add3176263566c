"""Holding: the tensors a node has, as planned or as its slice's folder holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minimax_tools.checkpoint.pickled import PickledReader
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.partition.plan import Slice
from minimax_tools.partition.read_record import ReadRecord
from minimax_tools.partition.slice_cut import PTH_FILE
from minimax_tools.partition.slice_file import SliceDescription
from minimax_tools.partition.tensor_digest import digest_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a node holds.

    Args:
        node: Its name.
        folder: Of its slice; None where it is only planned.
        sizes: Bytes by tensor.
        shapes: Dtype and shape of each tensor that was found, in words.
        digests: sha256 of each tensor that was found.
        noted: The digests that the slice's own slice.json notes.
        faults: Why the folder cannot be read, or is not the node's.
        record: What it took to read all of it; None where nothing was read.
    """

    node: str
    folder: Path | None = None
    sizes: Mapping[str, int] = field(default_factory=dict, repr=False)
    shapes: Mapping[str, str] = field(default_factory=dict, repr=False)
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    noted: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    faults: tuple[str, ...] = ()
    record: ReadRecord | None = field(default=None, repr=False)

    @classmethod
    def planned(cls, slice_: Slice, sizes: Mapping[str, int]) -> Holding:
        """What a node is to hold.

        Args:
            slice_: Its slice.
            sizes: Bytes of every tensor of the checkpoint.
        """
        held = {tensor.name: sizes.get(tensor.name, tensor.size_bytes) for tensor in slice_.tensors}
        return cls(node=slice_.node.name, sizes=held)

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
    def digest(self) -> str:
        """sha256 over the names and digests of all tensors that were found: two slices that agree in it are one."""
        lines = (f"{name} {digest}\n" for name, digest in sorted(self.digests.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def _read_folder(node: str, folder: Path, description: SliceDescription, faults: tuple[str, ...]) -> Holding:
    is_pth = (folder / PTH_FILE).is_file()
    with PickledReader(folder / PTH_FILE) if is_pth else CheckpointReader(folder) as reader:
        entries = reader.index.entries
        sizes = {name: entry.size_bytes for name, entry in entries.items()}
        digests = {name: digest_tensor(reader, entry) for name, entry in entries.items()}
    files: dict[str, int] = {}
    for entry in entries.values():
        files[entry.file.name] = files.get(entry.file.name, 0) + entry.size_bytes
    return Holding(
        node=node,
        folder=folder,
        sizes=sizes,
        shapes={name: f"{entry.dtype} {list(entry.shape)}" for name, entry in entries.items()},
        digests=digests,
        noted=description.tensors,
        faults=faults,
        record=ReadRecord.of(node, sizes, bytes_read=sum(sizes.values()), files=files),
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

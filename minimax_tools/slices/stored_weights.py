"""StoredWeights: a checkpoint's tensors on this machine, all of them or those of one slice.

Only headers are read until a tensor is asked for. Checkpoints of any architecture can be read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex, find_index, read_shard_header
from minimax_tools.checkpoint.weight_files import WeightFiles, find_weight_map
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.model.stored_names import StoredNames
from minimax_tools.partition.planned_slice import PlannedTensor, Slice
from minimax_tools.slices.description import SLICE_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """Weights of a checkpoint on this machine."""

    model: str  # the checkpoint as the user named it: a folder or a hub id
    folder: Path  # folder of its files, even before they are fetched
    index: TensorIndex | None  # headers of the shards that are here; None if no shard is

    @classmethod
    def of(cls, model: str) -> StoredWeights:
        """Find all weights of a folder, or fetch those of a hub's model.

        Raises:
            CheckpointError: There is no such model, or its files are damaged or contradict each other.
        """
        folder = resolve_model(model)
        return StoredWeights(model=model, folder=folder, index=find_index(folder))

    @classmethod
    def of_slice(cls, model: str, slice_: Slice) -> StoredWeights:
        """Find a slice's weights in a folder, or among the fetched files of a hub's model.

        Raises:
            CheckpointError: There is no such model, or its files contradict the plan (see `read_slice_index`).
        """
        folder = resolve_config(model)
        return StoredWeights(model=model, folder=folder, index=read_slice_index(folder, slice_))

    @property
    def headers(self) -> TensorIndex:
        """Index of the tensors, which must be here.

        Raises:
            CheckpointError: No shard is here.
        """
        if self.index is None:
            raise CheckpointError(
                f"{self.model} has no weights here",
                found=f"no weight file in {self.folder}",
                next_step="Fetch the slice first: mm2-split fetch.",
            )
        return self.index


def read_slice_index(folder: Path, slice_: Slice, *, stored_names: StoredNames | None = None) -> TensorIndex:
    """Read the headers of a slice's tensors, and of no others.

    `stored_names` translate the names of the result; None leaves those of the plan, under which tensors are stored.

    The files to open come from the plan. If it names none, they come from the checkpoint's index file, and without
    one all files are opened. The folder is the checkpoint's, and may lack files of other slices. Or it is the slice's
    own, written by `mm2-split extract`: then all its files are opened.

    Raises:
        CheckpointError: Files are missing or damaged, no file holds a tensor, or one lies elsewhere than planned.
            All faults are listed.
    """
    # A slice that was cut out has files and places of its own, which the plan does not know.
    is_cut_out = (folder / SLICE_FILE).is_file()
    planned = {tensor.name: tensor for tensor in slice_.tensors}
    files = _choose_files(folder, slice_, is_cut_out=is_cut_out)
    absent = {file for file in files if not (folder / file).is_file()}
    faults = [f"{file} is not here" for file in sorted(absent)]
    entries: dict[str, TensorEntry] = {}
    for file in files:
        if file in absent:
            continue
        for entry in _read_file(folder / file, faults):
            tensor = planned.get(entry.name)
            if tensor is None:
                # The file holds tensors of other nodes too.
                continue
            if tensor.name in entries:
                faults.append(f"{tensor.name} is both in {entries[tensor.name].file.name} and in {file}")
            # 100 000 names take ten megabytes: keep the plan's strings, not the header's copies.
            entries[tensor.name] = replace(entry, name=tensor.name)
            if not is_cut_out and not _is_as_planned(tensor, entry, file):
                faults.append(
                    f"{tensor.name} does not lie at bytes {tensor.start} to {tensor.stop} of {tensor.file}"
                )
    # A missing file is one fault already; its tensors are not listed again.
    faults += [
        f"no file holds {name}"
        for name, tensor in planned.items()
        if name not in entries and (is_cut_out or tensor.file not in absent)
    ]
    if faults:
        raise CheckpointError(
            f"{folder} does not hold what the plan gives node {slice_.node.name}",
            found=list_faults(faults),
            next_step="Fetch what is missing (mm2-split fetch). If this is another checkpoint than the plan's, "
            "make a new plan: mm2-split plan.",
        )
    return TensorIndex.of(folder, entries.values(), stored_names=stored_names)


def _choose_files(folder: Path, slice_: Slice, *, is_cut_out: bool) -> tuple[str, ...]:
    if not is_cut_out:
        if slice_.files:
            return slice_.files
        weight_map = find_weight_map(folder)
        if weight_map is not None:
            return tuple(sorted({weight_map[name] for name in slice_.names if name in weight_map}))
    files = WeightFiles.in_folder(folder)
    return () if files is None else files.shards


def _read_file(path: Path, faults: list[str]) -> tuple[TensorEntry, ...]:
    """Read the header of a file; if it is damaged, add that to the faults."""
    try:
        return read_shard_header(path)
    except CheckpointError as error:
        faults.append(f"{path.name} is damaged ({error.found})")
        return ()


def _is_as_planned(tensor: PlannedTensor, entry: TensorEntry, file: str) -> bool:
    """Decide whether an entry of `file` lies where the plan says, as far as it says so."""
    if tensor.file is None:
        return True
    if tensor.start is None:
        return tensor.file == file
    return (tensor.file, tensor.start, tensor.size_bytes) == (file, entry.offset, entry.size_bytes)

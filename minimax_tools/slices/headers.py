"""The headers of one slice: all that whoever reads the slice needs to know of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.weight_files import WeightFiles, read_weight_map
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.partition.planned_slice import PlannedTensor, Slice
from minimax_tools.slices.description import SLICE_FILE
from minimax_tools.torch_files.header import read_shard_header


def read_slice_index(folder: Path, slice_: Slice) -> TensorIndex:
    """The index of a slice's tensors, and of no others.

    Only the files are opened in which the plan places the slice; where it does not say, those that the checkpoint's
    index names; and where there is none, all. In a folder that was cut out, its own files, whatever the plan says.

    Args:
        folder: The whole checkpoint's, which may lack files of other slices; or the slice's own.
        slice_: The slice.

    Raises:
        CheckpointError: With every fault: files that are missing or damaged, tensors that no file holds, or that do
            not lie where the plan says.
    """
    is_cut_out = (folder / SLICE_FILE).is_file()
    own = {tensor.name: tensor for tensor in slice_.tensors}
    files = _here(folder) if is_cut_out else slice_.files or _likely_files(folder, own)
    absent = {file for file in files if not (folder / file).is_file()}
    faults = [f"{file} is not here" for file in sorted(absent)]
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for entry in _read_file(folder / file, faults) if file not in absent else ():
            tensor = own.get(entry.name)
            if tensor is None:
                continue
            if tensor.name in entries:
                faults.append(f"{tensor.name} is both in {entries[tensor.name].file.name} and in {file}")
            # A hundred thousand names take ten megabytes: once is enough.
            entries[tensor.name] = replace(entry, name=tensor.name)
            if not is_cut_out and not _is_as_planned(tensor, entry, file):
                faults.append(
                    f"{tensor.name} does not lie at bytes {tensor.start} to {tensor.stop} of {tensor.file}"
                )
    # What a missing file holds is not known, so nothing is said of it twice.
    faults += [
        f"no file holds {name}"
        for name, tensor in own.items()
        if name not in entries and (is_cut_out or tensor.file not in absent)
    ]
    if faults:
        raise CheckpointError(
            f"{folder} is not what the plan gives node {slice_.node.name}",
            found=list_faults(faults),
            next_step="Fetch what is missing (mm2-split fetch); or, if this is another checkpoint than the plan's, "
            "make the plan anew: mm2-split plan.",
        )
    return TensorIndex(folder=folder, entries=MappingProxyType(dict(sorted(entries.items()))))


def _here(folder: Path) -> tuple[str, ...]:
    files = WeightFiles.in_folder(folder)
    return () if files is None else files.shards


def _likely_files(folder: Path, names: Iterable[str]) -> tuple[str, ...]:
    """The files that hold the tensors of a plan that says nothing of files."""
    files = WeightFiles.in_folder(folder)
    if files is None or files.index_file is None:
        return () if files is None else files.shards
    weight_map = read_weight_map(folder / files.index_file)
    return tuple(sorted({weight_map[name] for name in names if name in weight_map}))


def _read_file(path: Path, faults: list[str]) -> tuple[TensorEntry, ...]:
    try:
        return read_shard_header(path)
    except CheckpointError as error:
        faults.append(f"{path.name} is damaged ({error.found})")
        return ()


def _is_as_planned(tensor: PlannedTensor, entry: TensorEntry, file: str) -> bool:
    if tensor.file is None:
        return True
    is_place = tensor.start is None or (tensor.start, tensor.size_bytes) == (entry.offset, entry.size_bytes)
    return tensor.file == file and is_place

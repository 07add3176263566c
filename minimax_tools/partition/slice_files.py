"""SliceFiles: which files of a checkpoint a slice needs, told by the tensors they hold and not by their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minimax_tools.checkpoint.hub import DESCRIBING_SUFFIXES
from minimax_tools.checkpoint.index import INDEX_FILE, read_weight_map
from minimax_tools.checkpoint.weight_files import PICKLED_INDEX_FILE, WeightFiles
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.partition.plan import Slice
from minimax_tools.partition.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFiles:
    """The files a slice needs.

    Args:
        weights: Those that hold some of its tensors, sorted.
        describing: Config, tokenizer and the like, which every slice needs, sorted.
    """

    weights: tuple[str, ...]
    describing: tuple[str, ...]

    @classmethod
    def of(cls, slice_: Slice, source: Source, names: Iterable[str]) -> SliceFiles:
        """The files of a slice among all of the checkpoint's, by their names.

        Places come from the plan; where it was made without headers, from the checkpoint's index; and where there
        is none, all weight files are needed. A file that the plan names may be missing among `names`.

        Raises:
            CheckpointError: The checkpoint has no weights, or its index lacks a tensor of the slice.
        """
        names = set(names)
        weights = _weight_files(slice_, source, names)
        describing = (name for name in names if "/" not in name and name.endswith(DESCRIBING_SUFFIXES))
        return cls(weights=tuple(sorted(weights)), describing=tuple(sorted(describing)))

    @property
    def all(self) -> tuple[str, ...]:
        """Weights first."""
        return (*self.weights, *self.describing)

    @property
    def patterns(self) -> tuple[str, ...]:
        """What a download by patterns would allow."""
        return (*self.weights, *(f"*{suffix}" for suffix in DESCRIBING_SUFFIXES))


def _weight_files(slice_: Slice, source: Source, names: set[str]) -> set[str]:
    if not slice_.tensors:
        return set()
    if slice_.files:
        return set(slice_.files)
    files = WeightFiles.among(names)
    if files is None:
        raise CheckpointError(f"{source.model} holds no weights", next_step="Check the model.")
    if files.index_file not in (INDEX_FILE, PICKLED_INDEX_FILE):
        return set(files.shards)
    weight_map = read_weight_map(source.folder / files.index_file)
    missing = [name for name in slice_.names if name not in weight_map]
    if missing:
        raise CheckpointError(
            f"the index of {source.model} lacks tensors of node {slice_.node.name}",
            found=list_faults(missing),
            next_step="Make the plan anew: mm2-split plan.",
        )
    return {weight_map[name] for name in slice_.names}

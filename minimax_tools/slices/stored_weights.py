"""StoredWeights: the tensors of a checkpoint that are here, whatever its architecture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.weight_files import SAFETENSORS_SUFFIX, WeightFiles
from minimax_tools.errors import CheckpointError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.partition.planned_slice import Slice
from minimax_tools.slices.headers import read_slice_index
from minimax_tools.torch_files.header import read_pickled_index
from minimax_tools.torch_files.reader import PickledReader


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """A checkpoint's weights.

    Args:
        model: As it was asked for: a folder or a hub id.
        folder: Where its files are, or will be once they are fetched.
        index: The headers of the shards that are here; None where no shard is.
    """

    model: str
    folder: Path
    index: TensorIndex | None

    @classmethod
    def of(cls, model: str) -> StoredWeights:
        """The weights of a folder, or of a hub's model, which is fetched.

        Raises:
            CheckpointError: There is no such model, or its files are damaged or contradict each other.
        """
        folder = resolve_model(model)
        return StoredWeights(model=model, folder=folder, index=read_index(folder))

    @classmethod
    def of_slice(cls, model: str, slice_: Slice) -> StoredWeights:
        """A slice's weights in a folder, or among what was fetched of a hub's model: no other header is read.

        Raises:
            CheckpointError: There is no such model, or its files are not what the plan says (see
                `read_slice_index`).
        """
        folder = resolve_config(model)
        return StoredWeights(model=model, folder=folder, index=read_slice_index(folder, slice_))

    @property
    def headers(self) -> TensorIndex:
        """The index, of which there must be one.

        Raises:
            CheckpointError: No shard is here.
        """
        if self.index is None:
            raise CheckpointError(
                f"{self.model} has no weights here",
                found=f"only its description, in {self.folder}",
                next_step="Fetch the slice first: mm2-split fetch.",
            )
        return self.index

    def open(self) -> CheckpointReader:
        """A reader of the tensors that are here, of safetensors or of `.bin` files.

        Raises:
            CheckpointError: No shard is here.
        """
        is_pickled = any(file.suffix != SAFETENSORS_SUFFIX for file in self.headers.files)
        return (PickledReader if is_pickled else CheckpointReader)(self.folder, index=self.headers)


def read_index(folder: Path) -> TensorIndex | None:
    """The headers of the shards that are here, of safetensors or of `.bin` files; None where no shard is.

    Raises:
        CheckpointError: They are damaged or contradict each other.
    """
    files = WeightFiles.in_folder(folder)
    if files is None or not files.shards:
        return None
    if not files.shards[0].endswith(SAFETENSORS_SUFFIX):
        return read_pickled_index(folder, may_lack_shards=True)
    # Of no layer is anything asked for: whoever needs a tensor is told then which shard is missing.
    index = TensorIndex.from_folder(folder, layers=range(0))
    return index if index.entries else None

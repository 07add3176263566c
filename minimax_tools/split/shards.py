"""Weights: what a checkpoint holds by its index, and a reader over the shards that one component needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from minimax_tools.checkpoint.header import TensorEntry, read_header
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import WEIGHT_DTYPES, CheckpointReader
from minimax_tools.checkpoint.weight_files import SAFETENSORS_SUFFIX, contradictions, faulty_checkpoint
from minimax_tools.errors import CheckpointError
from minimax_tools.split.module_names import ModuleNames, Slot
from minimax_tools.split.shard_loader import ShardLoader
from minimax_tools.torch_files.header import read_pickled_header
from minimax_tools.torch_files.reader import PickledReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The tensors of a checkpoint by the shard that holds each.

    Args:
        model: The checkpoint: a folder or a hub's id.
        weight_map: The shard's name by the tensor's.
    """

    model: str
    weight_map: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, model: str) -> Weights:
        """Read the index; of a hub's model no shard is fetched.

        Raises:
            CheckpointError: There is no such model, or its index is damaged.
        """
        return cls(model=model, weight_map=MappingProxyType(ShardLoader.load_index_json(model)["weight_map"]))

    @property
    def are_pickled(self) -> bool:
        """Whether they are PyTorch's `.bin` files."""
        return not all(name.endswith(SAFETENSORS_SUFFIX) for name in self.weight_map.values())

    def open(self, names: ModuleNames, slots: Mapping[str, Slot], *, layers: range) -> CheckpointReader:
        """A reader of the shards that hold what fills `slots`; these are fetched where they are not here.

        Raises:
            CheckpointError: A shard is missing, damaged or not what the index says, or cannot be fetched.
        """
        needed = names.select(self.weight_map, slots, layers=layers)
        return self._open_shards({self.weight_map[name] for name in needed})

    def open_first(self) -> CheckpointReader:
        """A reader of the first shard."""
        return self._open_shards({min(self.weight_map.values())})

    def _open_shards(self, shards: set[str]) -> CheckpointReader:
        total = len(set(self.weight_map.values()))
        logger.info("Shards: %d of %d needed", len(shards), total)
        paths = ShardLoader.download_shards_if_needed(self.model, shards)
        read = read_pickled_header if self.are_pickled else read_header
        headers: dict[str, tuple[TensorEntry, ...]] = {name: read(path) for name, path in paths.items()}
        if not headers:
            raise CheckpointError(f"{self.model} holds nothing of these layers")
        folder = next(iter(paths.values())).parent
        faults = contradictions(self.weight_map, headers)
        if faults:
            raise faulty_checkpoint(folder, faults)
        entries = {entry.name: entry for header in headers.values() for entry in header}
        index = TensorIndex(folder=folder, entries=MappingProxyType(dict(sorted(entries.items()))))
        return (
            PickledReader(folder, index=index) if self.are_pickled else CheckpointReader(folder, index=index)
        )


def by_place(index: TensorIndex) -> dict[str, TensorEntry]:
    """The index's entries in the order in which they lie on disk."""
    entries = sorted(index.entries.values(), key=lambda entry: (entry.file, entry.offset, entry.name))
    return {entry.name: entry for entry in entries}


def first_dtype(reader: CheckpointReader) -> torch.dtype:
    """The dtype of the first tensor that holds weights and is not FP8.

    Raises:
        CheckpointError: There is none.
    """
    for entry in by_place(reader.index).values():
        if entry.dtype in WEIGHT_DTYPES and entry.dtype != torch.float8_e4m3fn:
            return entry.dtype
    raise CheckpointError(f"{reader.folder} does not say which dtype the model has", next_step="Give dtype.")

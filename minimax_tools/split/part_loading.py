"""StoredModel: a checkpoint whose components are loaded one by one, each from the shards that it needs."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open

from minimax_tools.checkpoint.index import WEIGHT_DTYPES, TensorIndex, read_index
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.hub.checkpoint_folder import resolve_config
from minimax_tools.machine.memory import MemoryBudget, give_back_freed_pages
from minimax_tools.machine.size import format_size
from minimax_tools.model.architecture import (
    ARCHITECTURES,
    PART_EMBEDDING,
    PART_HEAD,
    PART_NORM,
    PART_REST,
    Architecture,
)
from minimax_tools.model.weight_names import SCALE_SUFFIX
from minimax_tools.split.causal_part import Division, ModelPart, unfit_checkpoint
from minimax_tools.split.module_tree import read_architecture
from minimax_tools.split.parts import Part
from minimax_tools.split.shard_loader import ShardLoader, names_by_part
from minimax_tools.stored_dtype import FLOAT8_E4M3FN

logger = logging.getLogger(__name__)

_MAPPED_DTYPES = frozenset(WEIGHT_DTYPES) - {FLOAT8_E4M3FN}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A checkpoint's tensors, each with its shard."""

    model: str  # folder or hub id of the checkpoint
    architecture: Architecture
    weight_map: Mapping[str, str] = field(repr=False)  # name of the shard by name of the tensor

    @classmethod
    def of(cls, model: str, model_type: str, *, num_layers: int) -> StoredModel:
        """Read the index of a checkpoint; no shard of a hub's model is fetched.

        Raises:
            CheckpointError: There is no such model, its index is damaged, or its names are unknown.
        """
        known = ARCHITECTURES.get(model_type)
        architecture = known or read_architecture(resolve_config(model))
        return cls(
            model=model,
            architecture=replace(architecture, num_layers=num_layers),
            weight_map=MappingProxyType(ShardLoader.load_index_json(model)["weight_map"]),
        )

    def first_dtype(self) -> torch.dtype:
        """Return the dtype of the first shard's first weight that is not FP8."""
        with self._open({min(self.weight_map.values())}) as reader:
            return first_dtype(reader)

    def load(
        self, division: Division, part: Part, *, device: torch.device, budget: MemoryBudget
    ) -> ModelPart:
        """Load a component from the shards that it needs, into its own memory.

        Raises:
            CheckpointError: A shard cannot be fetched or read. Or tensors are missing, have another shape or are left
                over: the message lists them all.
            MemoryBudgetError: The component does not fit the budget; nothing was allocated.
        """
        logger.info("Loading component: %s", part)
        by_part = names_by_part(self.weight_map, self.architecture)
        own: list[int | str] = [*part.layers]
        own += [PART_EMBEDDING] if part.has_embedding else []
        # A tensor of no known part fits the top if anything: transformers will say.
        own += [PART_NORM, PART_HEAD, PART_REST] if part.has_head else []
        names = {name for key in own for name in by_part.get(key, ())}
        if not part.has_embedding and division.tied_head is None:
            # The head's stand-in among the stored names, which nothing is tied to.
            names -= {*by_part.get(PART_EMBEDDING, ())}
        with self._open({self.weight_map[name] for name in names}) as reader:
            tensors = stored_weights(reader, names, dtype=division.implementation.dtype)
            # transformers would take either of two tensors of one place.
            spellings = Counter(name.removeprefix(f"{division.prefix}.") for name in tensors)
            twice = [f"{name} is there under two names" for name, count in spellings.items() if count > 1]
            if twice:
                raise unfit_checkpoint(reader.folder, twice)
            num_values = sum(math.prod(reader.index[name].shape) for name in tensors)
            num_bytes = num_values * division.implementation.dtype.itemsize
            if part.has_head and division.tied_head is not None:
                for name in set(by_part[PART_HEAD]) & set(by_part.get(PART_EMBEDDING, ())):
                    tensors[division.tied_head] = tensors.pop(name)
            num_experts = max(
                _num_experts_values(reader.index, by_part.get(layer, ())) for layer in part.layers
            )
            budget.require(
                num_bytes + num_experts * division.implementation.dtype.itemsize, f"loading {part}"
            )
            logger.info("Loading parameters: %s from %d tensors", format_size(num_bytes), len(tensors))
            started_s = time.monotonic()
            # A log gets no bar.
            shows_bar = logger.isEnabledFor(logging.INFO) and sys.stderr.isatty()
            loaded = division.load(part, tensors, where=reader.folder, device=device, shows_bar=shows_bar)
        # The allocator would keep what fused experts were made of.
        give_back_freed_pages()
        logger.info("Loaded %s in %.1f s", format_size(num_bytes), time.monotonic() - started_s)
        return loaded

    def _open(self, shards: set[str]) -> CheckpointReader:
        """Open shards, and fetch those that are not here."""
        logger.info("Shards: %d of %d needed", len(shards), len(set(self.weight_map.values())))
        paths = ShardLoader.download_shards_if_needed(self.model, shards)
        if not paths:
            raise CheckpointError(f"{self.model} holds no tensor of these layers")
        folder = next(iter(paths.values())).parent
        return CheckpointReader(folder, index=read_index(folder, sorted(shards), self.weight_map))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """A weight that is read when it is asked for, FP8 times its scales; a tensor of no weight's dtype is refused."""

    reader: CheckpointReader
    name: str
    dtype: torch.dtype  # dtype of an FP8 weight's values; others keep theirs

    def __getitem__(self, _: object) -> torch.Tensor:
        stored = self.reader.index[self.name].dtype
        dtype = self.dtype if stored == FLOAT8_E4M3FN else stored.as_torch()
        return self.reader.read_weight(self.name, dtype)


def stored_weights(reader: CheckpointReader, names: Iterable[str], *, dtype: torch.dtype) -> dict[str, Any]:
    """Return values that give a reader's tensors for `value[...]`, by name, without the scales of FP8 weights.

    FP8 weights are given in `dtype`. Tensors of safetensors that need no conversion stay mapped, as transformers maps
    them: until they are used they take no memory.
    """
    entries = [reader.index[name] for name in sorted(names)]
    mapped: dict[Path, Any] = {
        entry.file: safe_open(entry.file, framework="pt") for entry in entries if not entry.is_pickled
    }
    return {
        entry.name: mapped[entry.file].get_slice(entry.name)
        if entry.file in mapped and entry.dtype in _MAPPED_DTYPES
        else StoredWeight(reader=reader, name=entry.name, dtype=dtype)
        for entry in entries
        if not _is_scale(reader.index, entry.name)
    }


def _num_experts_values(index: TensorIndex, names: Iterable[str]) -> int:
    """Count the values of a layer's experts, which are held twice while transformers fuses them."""
    return sum(
        math.prod(index[name].shape) for name in names if ".experts." in name and not _is_scale(index, name)
    )


def _is_scale(index: TensorIndex, name: str) -> bool:
    weight = name.removesuffix(SCALE_SUFFIX) + ".weight"
    return name.endswith(SCALE_SUFFIX) and weight in index and index[weight].dtype == FLOAT8_E4M3FN


def first_dtype(reader: CheckpointReader) -> torch.dtype:
    """Return the dtype of the first weight on the disk that is not FP8.

    Raises:
        CheckpointError: The checkpoint has no such weight.
    """
    for entry in sorted(reader.index.entries.values(), key=lambda entry: entry.position):
        if entry.dtype in WEIGHT_DTYPES and entry.dtype != FLOAT8_E4M3FN:
            return entry.dtype.as_torch()
    raise CheckpointError(f"the dtype of {reader.folder} is unknown", next_step="Give dtype.")

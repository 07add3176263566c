"""A checkpoint whose components are loaded one by one, each from the shards that it needs, from a folder or the hub."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open

from minimax_tools.checkpoint.index import WEIGHT_DTYPES, TensorIndex, read_index
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.weight_files import WeightFiles, faulty_checkpoint, read_index_json
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import fetch_files, list_files, resolve_config
from minimax_tools.machine.memory import MemoryBudget, give_back_freed_pages
from minimax_tools.machine.size import format_size
from minimax_tools.model.architecture import (
    ARCHITECTURES,
    PART_EMBEDDING,
    PART_HEAD,
    PART_NORM,
    PART_REST,
    Architecture,
    ParamMapper,
    part_of,
)
from minimax_tools.model.weight_names import SCALE_SUFFIX
from minimax_tools.split.causal_part import Division, ModelPart, unfit_checkpoint
from minimax_tools.split.module_tree import read_architecture
from minimax_tools.split.parts import Part, Role
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


class ShardLoader:
    """A loader of parts of checkpoints: of safetensors if there are any, else of `.bin` files.

    A checkpoint is a folder or a hub id. `access` says how to reach the hub; by default, environment variables do.
    Only needed files are fetched, and only wanted tensors are read. Methods that take `model_path` raise without it.

    | to get | call |
    |---|---|
    | whether the weights lie in several files | `is_sharded_model` |
    | the file of each tensor | `load_index_json` |
    | the files of a component | `get_required_shards_for_component` |
    | the files | `download_shards_if_needed` |
    | the tensors | `load_shard_partial` |
    """

    @staticmethod
    def is_sharded_model(model_path: str | Path, *, access: HubAccess | None = None) -> bool:
        """Decide whether the model has an index of shards, or weights in more than one file.

        Raises:
            CheckpointError: The folder is missing, the hub does not answer, or the model has no weights.
        """
        return _find_weights(model_path, access).is_sharded

    @staticmethod
    def load_index_json(model_path: str | Path, *, access: HubAccess | None = None) -> dict[str, Any]:
        """Return the index: `weight_map` maps each tensor to its file, `metadata` is a dict.

        An index file is checked against the headers of the shards on this machine; shards may be absent. If there is
        no index file, all files are fetched, and the index is made from their headers.

        Raises:
            CheckpointError: As for `is_sharded_model`. Or the index file or a shard is damaged, they contradict
                each other, or a tensor lies in two files: the message lists all faults.
        """
        files = _find_weights(model_path, access)
        names = files.shards if files.index_file is None else (files.index_file,)
        paths = fetch_files(str(model_path), names, access=access)
        folder = paths[names[0]].parent
        if files.index_file is None:
            index = read_index(folder, files.shards, None)
            if not index.entries:
                raise faulty_checkpoint(folder, ["its files hold no tensor"])
            return {
                "metadata": {"total_size": sum(entry.size_bytes for entry in index.entries.values())},
                "weight_map": {name: entry.file.name for name, entry in index.entries.items()},
            }
        index_json = read_index_json(paths[files.index_file])
        weight_map = index_json["weight_map"]
        read_index(folder, sorted(set(weight_map.values())), weight_map, may_lack_shards=True)
        return index_json

    @staticmethod
    def get_required_shards_for_component(
        index_json: Mapping[str, Any],
        component: str,
        layer_range: tuple[int, int],
        model_type: str | Architecture,
        include_embedding: bool = False,
        include_final_norm: bool = False,
        include_lm_head: bool = False,
    ) -> set[str]:
        """Return the names of the files that hold a component's tensors, block scales included.

        Args:
            index_json: Index from `load_index_json`.
            component: bottom, trunk or top. It is named in errors; the other arguments say what belongs to it.
            layer_range: First layer, and the layer after the last.
            model_type: `model_type` of config.json, or the `Architecture` of a model that mm2 does not know.
            include_embedding: Whether the embeddings of tokens and of positions are included.
            include_final_norm: Whether the norm after the last layer is included.
            include_lm_head: Whether the head is included. For a tied head the token embedding is included.

        Raises:
            CheckpointError: The checkpoint has no tensor of a layer or module that was asked for.
            UsageError: `model_type` is unknown.
            ValueError: The component is unknown, or the range ends before it starts.
        """
        layers = range(*layer_range)
        if component not in tuple(Role):
            raise ValueError(f"component is {component!r}, expected one of {', '.join(Role)}")
        if not 0 <= layers.start <= layers.stop:
            raise ValueError(f"the layers of {component} are {layers}, expected 0 <= first <= end")
        weight_map = _weight_map(index_json)
        by_part = names_by_part(weight_map, model_type)
        parts: list[int | str] = [*layers]
        parts += [PART_EMBEDDING] if include_embedding else []
        parts += [PART_NORM] if include_final_norm else []
        parts += [PART_HEAD] if include_lm_head else []
        missing = [
            f"layer {part}" if isinstance(part, int) else part for part in parts if not by_part.get(part)
        ]
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks tensors of {component}",
                expected=f"layers {layers.start} to {layers.stop - 1} and what else was asked for",
                found=f"nothing of {list_faults(missing)}",
                next_step="Check the split points against num_hidden_layers, and model_type against config.json.",
            )
        return {weight_map[name] for part in parts for name in by_part[part]}

    @staticmethod
    def download_shards_if_needed(
        model_path: str | Path, shard_files: Iterable[str], *, access: HubAccess | None = None
    ) -> dict[str, Path]:
        """Return the paths of a model's shards by name; missing shards are fetched from the hub.

        Raises:
            CheckpointError: The folder lacks shards (the message names them all), or the hub did not give one.
        """
        return fetch_files(str(model_path), sorted(shard_files), access=access)

    @staticmethod
    def load_shard_partial(
        shard_path: str | Path, filter_fn: Callable[[str], bool]
    ) -> dict[str, torch.Tensor]:
        """Read the tensors of one file whose names `filter_fn` accepts, on the CPU and in their stored dtypes.

        Only the header and the bytes of these tensors are read; the file is not mapped.

        Raises:
            CheckpointError: The file is missing, damaged or of another format.
        """
        path = Path(shard_path)
        index = TensorIndex.from_file(path)
        with CheckpointReader(path.parent, index=index) as reader:
            return {name: reader.read(name) for name in index.names if filter_fn(name)}


def names_by_part(names: Collection[str], model_type: str | Architecture) -> dict[int | str, list[str]]:
    """Return the names of each part's tensors; those of a tied head are the token embedding's."""
    by_part: dict[int | str, list[str]] = {}
    for name in names:
        by_part.setdefault(part_of(name, model_type), []).append(name)
    if PART_HEAD not in by_part:
        by_part[PART_HEAD] = [name for name in names if ParamMapper.is_token_embedding(name, model_type)]
    return by_part


def _find_weights(model_path: str | Path, access: HubAccess | None) -> WeightFiles:
    names = list_files(str(model_path), access=access)
    files = WeightFiles.among(names)
    if files is None:
        raise CheckpointError(
            f"no weights at {str(model_path)!r}",
            expected="safetensors, or pytorch_model.bin",
            found=", ".join(names[:8]) or "no files",
            next_step="Give a folder or hub id of a checkpoint.",
        )
    return files


def _weight_map(index_json: Mapping[str, Any]) -> Mapping[str, str]:
    weight_map = index_json.get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise CheckpointError(
            "the index has no weight_map",
            found=", ".join(map(str, index_json)) or "nothing",
            next_step="Give the index that ShardLoader.load_index_json returned.",
        )
    return weight_map

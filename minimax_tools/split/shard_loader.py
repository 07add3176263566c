"""ShardLoader: the shards and tensors that a component of a split model needs, from a folder or the hub."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from minimax_tools.checkpoint.index import TensorIndex, read_index
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.weight_files import WeightFiles, faulty_checkpoint, read_index_json
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import fetch_files, list_files
from minimax_tools.model.architecture import (
    PART_EMBEDDING,
    PART_HEAD,
    PART_NORM,
    Architecture,
    ParamMapper,
    part_of,
)
from minimax_tools.split.parts import Role


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

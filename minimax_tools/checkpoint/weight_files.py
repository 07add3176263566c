"""The weight files of a checkpoint, in a folder or on the hub, and its index file, which names each tensor's file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.errors import CheckpointError, format_count, list_faults, shorten
from minimax_tools.machine.files import is_plain_name
from minimax_tools.machine.json_file import read_json

INDEX_FILE = "model.safetensors.index.json"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_SUFFIX = ".safetensors"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth")

# Other .bin files, such as training_args.bin and optimizer.bin, hold no weights.
_PICKLED_FILE = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")

# Suffixes under which modules are pickled whole.
_MODULE_SUFFIXES = (*PICKLED_SUFFIXES, ".pkl")

# Numbered shards, as in model-00001-of-00004.safetensors.
_NUMBERED = re.compile(r"-of-([0-9]+)\.")
_NUM_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The weight files of a checkpoint: safetensors if there are any, else PyTorch's `.bin`.

    If there is an index, it alone tells which files belong to the checkpoint: `shards` may hold others too.
    """

    index_file: str | None  # name of the index; None if the checkpoint has none
    shards: tuple[str, ...]  # names of the weight files that are present, sorted

    @classmethod
    def in_folder(cls, folder: Path) -> WeightFiles | None:
        """Find the weight files in a folder; None if it has neither a weight file nor an index."""
        return cls.among([path.name for path in folder.iterdir() if path.is_file()])

    @classmethod
    def among(cls, names: Collection[str]) -> WeightFiles | None:
        """Find the weight files among the names of a checkpoint's files; None if there are none."""
        safetensors = sorted(name for name in names if name.endswith(SAFETENSORS_SUFFIX) and "/" not in name)
        pickled = cls._pickled_among(names)
        # An index alone counts only without `.bin` shards: it may have been fetched without its safetensors.
        if safetensors or (INDEX_FILE in names and (pickled is None or not pickled.shards)):
            if INDEX_FILE in names:
                return cls(index_file=INDEX_FILE, shards=tuple(safetensors))
            # Other safetensors beside a whole model are adapters or copies.
            is_one_file = SAFETENSORS_FILE in safetensors
            return cls(index_file=None, shards=(SAFETENSORS_FILE,) if is_one_file else tuple(safetensors))
        return pickled

    @classmethod
    def _pickled_among(cls, names: Collection[str]) -> WeightFiles | None:
        shards = tuple(sorted(name for name in names if _PICKLED_FILE.fullmatch(name)))
        index_file = PICKLED_INDEX_FILE if PICKLED_INDEX_FILE in names else None
        return cls(index_file=index_file, shards=shards) if shards or index_file else None

    @property
    def is_sharded(self) -> bool:
        """True if the weights are spread over files: there is an index, several files, or one numbered file."""
        return self.index_file is not None or len(self.shards) > 1 or self.is_numbered

    @property
    def is_numbered(self) -> bool:
        """True if a file's name says that it is one of several."""
        return any(map(_is_one_of_many, self.shards))


def find_weight_map(folder: Path) -> dict[str, str] | None:
    """Read the shard of each tensor from a folder's index file; None if there is none.

    Raises:
        CheckpointError: The index file is damaged.
    """
    files = WeightFiles.in_folder(folder)
    return None if files is None or files.index_file is None else read_weight_map(folder / files.index_file)


def read_weight_map(path: Path) -> dict[str, str]:
    """Read the shard of each tensor from an index file, as `read_index_json` does."""
    weight_map: dict[str, str] = read_index_json(path)["weight_map"]
    return weight_map


def read_index_json(path: Path) -> dict[str, Any]:
    """Read an index file whole: `weight_map` maps tensors to names of files beside the index, `metadata` is a dict.

    A file that is missing, no index, or names files in other folders is a CheckpointError.
    """
    index_json = _read_index(path)
    files_elsewhere = sorted(
        {repr(shorten(file)) for file in index_json["weight_map"].values() if not is_plain_name(file)}
    )
    if files_elsewhere:
        raise CheckpointError(
            f"{path} names files that do not lie beside it, or that no folder can hold",
            found=", ".join(files_elsewhere[:_NUM_NAMES_SHOWN]),
            next_step="Fetch the file again from a source that you trust.",
        )
    # Some tools write null as metadata.
    return {**index_json, "metadata": index_json.get("metadata") or {}}


def find_header_faults(
    headers: Mapping[str, Iterable[TensorEntry]], weight_map: Mapping[str, str] | None
) -> list[str]:
    """Return a sentence for each tensor in two shards, and for each disagreement with the index about a tensor.

    `headers` has the tensors in each shard; others are not judged. `weight_map` is the index's: shards by tensor, or
    None without an index.
    """
    faults = []
    first_shards: dict[str, str] = {}
    for shard, header in headers.items():
        for entry in header:
            first = first_shards.setdefault(entry.name, shard)
            if first != shard:
                faults.append(f"{entry.name} is both in {first} and in {shard}")
    return faults if weight_map is None else faults + _find_index_faults(headers, weight_map)


def _find_index_faults(
    headers: Mapping[str, Iterable[TensorEntry]], weight_map: Mapping[str, str]
) -> list[str]:
    names_indexed: dict[str, set[str]] = {shard: set() for shard in headers}
    for name, shard in weight_map.items():
        if shard in headers:
            names_indexed[shard].add(name)
    faults = []
    for shard, header in headers.items():
        names_held = {entry.name for entry in header}
        faults += [
            f"the index places {name} in {shard}, whose header lacks it"
            for name in sorted(names_indexed[shard] - names_held)
        ]
        for name in sorted(names_held - names_indexed[shard]):
            index_claim = f"places it in {weight_map[name]}" if name in weight_map else "lacks it"
            faults.append(f"{shard} holds {name}, the index {index_claim}")
    return faults


def faulty_checkpoint(folder: Path, faults: list[str]) -> CheckpointError:
    """Return the error that lists the faults of a checkpoint."""
    return CheckpointError(
        f"the checkpoint at {folder} has {format_count(len(faults), 'fault')}",
        found=list_faults(faults),
        next_step="Fetch the named files again; if only the index is wrong, fetch or remove that.",
    )


def refuse_pickled_module(path: Path) -> None:
    """Raise CheckpointError if a checkpoint is a module that was pickled whole, or a folder of one; name its class."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if not file.is_file() or file.suffix not in _MODULE_SUFFIXES:
            continue
        # This import needs torch, which folders without such a file do not.
        from minimax_tools.torch_file import find_pickled_module

        pickled = find_pickled_module(file)
        if pickled is not None:
            raise CheckpointError(
                f"no checkpoint at {path}",
                expected="safetensors shards",
                found=f"a pickled module, {pickled}"
                if file == path
                else f"a pickled module, {file.name}: {pickled}",
                next_step="Save its tensors alone, safetensors.torch.save_file(module.state_dict(), FILE), with its "
                "config.json.",
            )


def _is_one_of_many(name: str) -> bool:
    match = _NUMBERED.search(name)
    return match is not None and int(match[1]) > 1


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index_json: dict[str, Any] = read_json(path)
        weight_map = index_json["weight_map"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read",
            expected="JSON with a weight_map",
            found=shorten(repr(error)),
            next_step="Fetch the file again, or remove it: the shards' headers suffice.",
        ) from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path} has a weight_map that does not map tensors to files")
    if not isinstance(index_json.get("metadata"), dict | None):
        found = shorten(repr(index_json["metadata"]))
        raise CheckpointError(f"{path} is damaged", expected="metadata that are an object", found=found)
    return index_json

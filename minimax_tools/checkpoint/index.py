"""TensorIndex: which tensors a checkpoint folder holds and where, as the shards' own headers say.

`model.safetensors.index.json` only says which files belong to the checkpoint; what it claims about them is
checked against their headers. Without it, every `*.safetensors` of the folder belongs.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from minimax_tools.checkpoint.header import TensorEntry, read_header
from minimax_tools.checkpoint.names import SCALE_SUFFIX, layer_of, layer_prefix
from minimax_tools.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
_NUM_FAULTS_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIndex:
    """Every stored tensor of a checkpoint folder by its full name, in the order of the names."""

    folder: Path
    entries: Mapping[str, TensorEntry] = field(repr=False)

    @classmethod
    def from_folder(cls, folder: Path) -> TensorIndex:
        """Read the headers of the folder's shards; no tensor data is read.

        Raises:
            CheckpointError: Listing every fault at once: a shard is missing or damaged, a tensor lies in two
                files, or the index file and the headers contradict each other.
        """
        weight_map = _read_weight_map(folder)
        files = _shards(folder) if weight_map is None else _named_shards(folder, weight_map)
        faults: list[str] = []
        entries, readable = _read_entries(files, faults)
        if weight_map is not None:
            faults += _contradictions(weight_map, entries, {file.name for file in readable}, folder)
        if faults:
            raise _faulty(folder, faults)
        return cls(folder=folder, entries=MappingProxyType(dict(sorted(entries.items()))))

    @property
    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(self.entries)

    @property
    def files(self) -> tuple[Path, ...]:
        """The shards that hold at least one tensor, sorted."""
        return tuple(sorted({entry.file for entry in self.entries.values()}))

    @property
    def layers(self) -> tuple[int, ...]:
        """The decoder layers of which at least one tensor is here, ascending."""
        found = {layer_of(name) for name in self.entries}
        return tuple(sorted(layer for layer in found if layer is not None))

    def layer_names(self, layer: int) -> tuple[str, ...]:
        """Full names of all tensors of one decoder layer, scales included, sorted; may be empty."""
        prefix = layer_prefix(layer)
        names = self.names
        # Sorted names that share a prefix are neighbours; "/" is the character after ".".
        return names[bisect_left(names, prefix) : bisect_left(names, prefix[:-1] + "/")]

    def digest(self) -> str:
        """sha256 over names and shapes without block scales: an FP8 and a BF16 copy agree."""
        digest = hashlib.sha256()
        for name, entry in self.entries.items():
            if not name.endswith(SCALE_SUFFIX):
                digest.update(f"{name} {list(entry.shape)}\n".encode())
        return digest.hexdigest()

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> TensorEntry:
        """The entry of that name.

        Raises:
            CheckpointError: The folder holds no such tensor.
        """
        try:
            return self.entries[name]
        except KeyError:
            raise CheckpointError(
                f"{self.folder} holds no tensor {name!r}",
                found=f"{len(self.entries)} tensors of {_named_layers(self.layers)}",
                next_step="Fetch the shards that are missing, or choose layers that this folder holds.",
            ) from None


def _read_weight_map(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_FILE
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read",
            expected="JSON with a weight_map",
            found=repr(error),
            next_step="Fetch the file again, or remove it: the shards' headers suffice.",
        ) from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path} has a weight_map that does not map tensors to files")
    return weight_map


def _shards(folder: Path) -> list[Path]:
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(
            f"no checkpoint at {folder}",
            expected="safetensors shards",
            found="none in the folder" if folder.is_dir() else "no such folder",
            next_step="Give --model a folder or a hub id, or make one: mm2-split synthesize --output DIR.",
        )
    return shards


def _named_shards(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    return sorted({folder / name for name in weight_map.values()})


def _read_entries(files: Iterable[Path], faults: list[str]) -> tuple[dict[str, TensorEntry], list[Path]]:
    entries: dict[str, TensorEntry] = {}
    readable = []
    for file in files:
        if not file.is_file():
            faults.append(f"shard {file.name} is missing")
            continue
        try:
            header = read_header(file)
        except CheckpointError as error:
            faults.append(f"shard {file.name} is damaged ({error.found})")
            continue
        readable.append(file)
        for entry in header:
            first = entries.setdefault(entry.name, entry)
            if first is not entry:
                faults.append(f"{entry.name} is both in {first.file.name} and in {file.name}")
    return entries, readable


def _contradictions(
    weight_map: Mapping[str, str], entries: Mapping[str, TensorEntry], readable: set[str], folder: Path
) -> list[str]:
    faults = []
    for name, claimed in weight_map.items():
        entry = entries.get(name)
        if entry is None and Path(claimed).name in readable:
            faults.append(f"the index places {name} in {claimed}, whose header lacks it")
        elif entry is not None and entry.file != folder / claimed:
            faults.append(f"the index places {name} in {claimed}, it is in {entry.file.name}")
    extra = [name for name in entries if name not in weight_map]
    return faults + [f"the index lacks {name}, which {entries[name].file.name} holds" for name in extra]


def _faulty(folder: Path, faults: list[str]) -> CheckpointError:
    shown = faults[:_NUM_FAULTS_SHOWN]
    if len(faults) > len(shown):
        shown.append(f"and {len(faults) - len(shown)} more")
    return CheckpointError(
        f"the checkpoint at {folder} has {len(faults)} fault{'s' if len(faults) > 1 else ''}",
        found="; ".join(shown),
        next_step=f"Fetch the named files again; if only {INDEX_FILE} is wrong, fetch or remove that.",
    )


def _named_layers(layers: tuple[int, ...]) -> str:
    if not layers:
        return "no decoder layer"
    return f"{len(layers)} decoder layers between {layers[0]} and {layers[-1]}"

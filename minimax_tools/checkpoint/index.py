"""TensorIndex: which tensors a checkpoint folder holds and where, as the shards' own headers say.

`model.safetensors.index.json` only says which files belong to the checkpoint; what it claims about them is
checked against their headers. Without it, every `*.safetensors` of the folder belongs. Who says which layers will
be read may do with a folder that lacks the shards of others.
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
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.model.weight_names import SCALE_SUFFIX, layer_of, layer_prefix

INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIndex:
    """Every stored tensor of a checkpoint folder by its full name, in the order of the names.

    `absent` maps the tensors that the index file names and no shard here holds to the shards that do.
    """

    folder: Path
    entries: Mapping[str, TensorEntry] = field(repr=False)
    absent: Mapping[str, str] = field(repr=False, default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path, *, layers: range | None = None) -> TensorIndex:
        """Read the headers of the folder's shards; no tensor data is read.

        Args:
            folder: The checkpoint folder.
            layers: The decoder layers that will be read: shards that hold nothing of them may be missing, and
                their tensors are `absent`. None: every shard must be here.

        Raises:
            CheckpointError: Listing every fault at once: a shard is missing or damaged, a tensor lies in two
                files, or the index file and the headers contradict each other.
        """
        weight_map = _weight_map(folder)
        files = _shards(folder) if weight_map is None else _named_shards(folder, weight_map)
        missing = {file.name for file in files if not file.is_file()} if layers is not None else set()
        faults: list[str] = []
        entries, readable = _read_entries((file for file in files if file.name not in missing), faults)
        absent: dict[str, str] = {}
        if weight_map is not None:
            faults += _contradictions(weight_map, entries, {file.name for file in readable}, folder)
            absent = {name: file for name, file in weight_map.items() if Path(file).name in missing}
            faults += _needed_but_absent(absent, layers)
        if faults:
            raise _faulty(folder, faults)
        return cls(
            folder=folder,
            entries=MappingProxyType(dict(sorted(entries.items()))),
            absent=MappingProxyType(dict(sorted(absent.items()))),
        )

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

    def digest(self, layer: int | None) -> str | None:
        """sha256 over names and shapes of a layer's tensors, or, for None, of those outside all layers.

        Block scales are left out: an FP8 and a BF16 copy agree. None where some of the tensors are absent.
        """
        if layer is None:
            names = tuple(name for name in self.names if layer_of(name) is None)
            is_whole = all(layer_of(name) is not None for name in self.absent)
        else:
            names = self.layer_names(layer)
            is_whole = not any(name.startswith(layer_prefix(layer)) for name in self.absent)
        if not is_whole:
            return None
        return digest_shapes({name: self.entries[name].shape for name in names})

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> TensorEntry:
        """The entry of that name.

        Raises:
            CheckpointError: The folder holds no such tensor, or lacks the shard that does.
        """
        try:
            return self.entries[name]
        except KeyError:
            if name in self.absent:
                raise CheckpointError(
                    f"{name} cannot be read: its shard {self.absent[name]} is not in {self.folder}",
                    found=f"{len(self.files)} shards of {_named_layers(self.layers)}",
                    next_step="Fetch that shard too, or choose layers that this folder holds.",
                ) from None
            raise CheckpointError(
                f"{self.folder} holds no tensor {name!r}",
                found=f"{len(self.entries)} tensors of {_named_layers(self.layers)}",
                next_step="Fetch the shards that are missing, or choose layers that this folder holds.",
            ) from None


def digest_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """sha256 over tensors' names and shapes, block scales left out."""
    digest = hashlib.sha256()
    for name in sorted(shapes):
        if not name.endswith(SCALE_SUFFIX):
            digest.update(f"{name} {list(shapes[name])}\n".encode())
    return digest.hexdigest()


def read_weight_map(path: Path) -> dict[str, str]:
    """What an index file claims: the shard's name by the tensor's.

    Raises:
        CheckpointError: The file is missing or no index.
    """
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
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


def find_absent_shards(folder: Path) -> tuple[str, ...]:
    """The shards that the folder's index file names and the folder lacks; none where there is no index file.

    Raises:
        CheckpointError: The index file is damaged.
    """
    files = sorted(set((_weight_map(folder) or {}).values()))
    return tuple(file for file in files if not (folder / file).is_file())


def _weight_map(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_FILE
    return read_weight_map(path) if path.exists() else None


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


def _needed_but_absent(absent: Mapping[str, str], layers: range | None) -> list[str]:
    needed: dict[str, set[int]] = {}
    for name, file in absent.items():
        layer = layer_of(name)
        if layers is not None and layer is not None and layer in layers:
            needed.setdefault(file, set()).add(layer)
    return [
        f"shard {file} is missing, which holds tensors of layer {', '.join(map(str, sorted(found)))}"
        for file, found in sorted(needed.items())
    ]


def _faulty(folder: Path, faults: list[str]) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint at {folder} has {len(faults)} fault{'s' if len(faults) > 1 else ''}",
        found=list_faults(faults),
        next_step=f"Fetch the named files again; if only {INDEX_FILE} is wrong, fetch or remove that.",
    )


def _named_layers(layers: tuple[int, ...]) -> str:
    if not layers:
        return "no decoder layer"
    return f"{len(layers)} decoder layers between {layers[0]} and {layers[-1]}"

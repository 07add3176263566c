"""The tensors of a checkpoint folder: shard and offset of each, from the shards' headers.

`model.safetensors.index.json` says which files belong to the checkpoint; its other claims are checked against the
headers. Without it, every `*.safetensors` of the folder belongs. If only some layers will be read, shards without
tensors of these layers may be missing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from minimax_tools.checkpoint.header import TensorEntry, read_header
from minimax_tools.checkpoint.weight_files import (
    INDEX_FILE,
    PICKLED_SUFFIXES,
    SAFETENSORS_SUFFIX,
    WeightFiles,
    faulty_checkpoint,
    find_header_faults,
    find_weight_map,
    read_weight_map,
    refuse_pickled_module,
)
from minimax_tools.errors import CheckpointError
from minimax_tools.model.quantisation import scale_shape
from minimax_tools.model.spec import refuse_gguf, stored_names_in
from minimax_tools.model.stored_names import StoredNames
from minimax_tools.model.weight_names import SCALE_SUFFIX, layer_of, layer_prefix, scale_name
from minimax_tools.stored_dtype import BFLOAT16, FLOAT8_E4M3FN, FLOAT16, FLOAT32

# Stored dtypes of block scales, and of weights; other dtypes hold codes that mm2 cannot read.
_SCALE_DTYPES = (FLOAT32, BFLOAT16)
WEIGHT_DTYPES = (FLOAT8_E4M3FN, BFLOAT16, FLOAT16, FLOAT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIndex:
    """Stored tensors of a checkpoint folder, by full name, sorted.

    Names are mm2's where the family is known; `names` gives the stored ones.
    """

    folder: Path
    entries: Mapping[str, TensorEntry] = field(repr=False)  # tensors of the shards that are here
    # The shard of each tensor that is not here, by the tensor's name.
    absent: Mapping[str, str] = field(repr=False, default_factory=dict)
    stored_names: StoredNames = field(default_factory=StoredNames, repr=False)
    # What `digest` returned: a command asks for each layer of 100 000 tensors, and always for those outside all layers.
    _digests: dict[int | None, str | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def from_folder(
        cls, folder: Path, *, layers: range | None = None, stored_names: StoredNames | None = None
    ) -> TensorIndex:
        """Read the headers of the folder's shards; no tensor data is read.

        `stored_names` translate the names; None takes those of the family that config.json names.

        `layers` are the decoder layers that will be read: shards without any of their tensors may be missing. With
        None every shard must be here.

        Raises:
            CheckpointError: A shard is missing or damaged, a tensor lies in two files, or the index file and the
                headers contradict each other. All faults are listed.
        """
        weight_map = _find_weight_map(folder)
        shards = _find_shards(folder) if weight_map is None else sorted(set(weight_map.values()))
        return read_index(
            folder,
            shards,
            weight_map,
            may_lack_shards=layers is not None,
            layers=layers,
            stored_names=stored_names_in(folder) if stored_names is None else stored_names,
        )

    @classmethod
    def from_file(cls, path: Path) -> TensorIndex:
        """Read the header of a single file; raise CheckpointError as `read_shard_header` does."""
        return cls.of(path.parent, read_shard_header(path))

    @classmethod
    def of(
        cls,
        folder: Path,
        entries: Iterable[TensorEntry],
        absent: Mapping[str, str] = MappingProxyType({}),
        stored_names: StoredNames | None = None,
    ) -> TensorIndex:
        """Build the index of tensors in any order, of which no two have the same name.

        Names of `entries` are the stored ones; `stored_names` translate them, and None leaves them. Those of `absent`
        are translated.
        """
        names = stored_names or StoredNames()
        own = (
            (replace(entry, name=names.own(entry.name)) for entry in entries) if names.translates else entries
        )
        return cls(
            folder=folder,
            stored_names=names,
            entries=MappingProxyType(
                {entry.name: entry for entry in sorted(own, key=lambda entry: entry.name)}
            ),
            absent=MappingProxyType(dict(sorted(absent.items()))),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, sorted."""
        return tuple(self.entries)

    @property
    def files(self) -> tuple[Path, ...]:
        """Shards with at least one tensor, sorted."""
        return tuple(sorted({entry.file for entry in self.entries.values()}))

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers with at least one tensor here, ascending."""
        found = {layer_of(name) for name in self.entries}
        return tuple(sorted(layer for layer in found if layer is not None))

    def layer_names(self, layer: int) -> tuple[str, ...]:
        """List the full names of a decoder layer's tensors, scales included, sorted."""
        prefix = layer_prefix(layer)
        names = self.names
        # Sorted names that share a prefix are neighbours; "/" is the character after ".".
        return names[bisect_left(names, prefix) : bisect_left(names, prefix[:-1] + "/")]

    def digest(self, layer: int | None) -> str | None:
        """Compute sha256 over the names and shapes of a layer's tensors; with None, of tensors outside all layers.

        It tells architectures apart, not weights (see `ModelFingerprint`). Block scales are left out: an FP8 and a BF16
        copy agree. The result is None if some of the tensors are absent.
        """
        if layer not in self._digests:
            self._digests[layer] = self._compute_digest(layer)
        return self._digests[layer]

    def _compute_digest(self, layer: int | None) -> str | None:
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
        """Return the entry of a tensor; raise CheckpointError if the folder lacks it, or the shard that holds it."""
        try:
            return self.entries[name]
        except KeyError:
            stored = self.stored_names.stored(name)
            if name in self.absent:
                raise CheckpointError(
                    f"{stored} cannot be read: its shard {self.absent[name]} is not in {self.folder}",
                    found=f"{len(self.files)} shards of {_describe_layers(self.layers)}",
                    next_step="Fetch that shard too, or choose layers that this folder holds.",
                ) from None
            raise CheckpointError(
                f"{self.folder} holds no tensor {stored!r}",
                found=f"{len(self.entries)} tensors of {_describe_layers(self.layers)}",
                next_step="Fetch the shards that are missing, or choose layers that this folder holds.",
            ) from None


def digest_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Compute sha256 over tensors' names and shapes, block scales left out."""
    digest = hashlib.sha256()
    for name in sorted(shapes):
        if not name.endswith(SCALE_SUFFIX):
            digest.update(f"{name} {list(shapes[name])}\n".encode())
    return digest.hexdigest()


def find_absent_shards(folder: Path) -> tuple[str, ...]:
    """List the shards that the folder's index file names and the folder lacks; none without an index file."""
    files = sorted(set((_find_weight_map(folder) or {}).values()))
    return tuple(file for file in files if not (folder / file).is_file())


def find_index(folder: Path) -> TensorIndex | None:
    """Read the headers of the shards that are here, safetensors or `.bin` files; None if no shard is.

    Raises:
        CheckpointError: They are damaged or contradict each other.
    """
    files = WeightFiles.in_folder(folder)
    if files is None or not files.shards:
        return None
    weight_map = find_weight_map(folder)
    shards = files.shards if weight_map is None else sorted(set(weight_map.values()))
    index = read_index(folder, shards, weight_map, may_lack_shards=True)
    return index if index.entries else None


def read_index(
    folder: Path,
    shards: Sequence[str],
    weight_map: Mapping[str, str] | None,
    *,
    may_lack_shards: bool = False,
    layers: range | None = None,
    stored_names: StoredNames | None = None,
) -> TensorIndex:
    """Read the headers of a checkpoint's shards, and check them against its index file's weight map.

    Shards may be missing if `may_lack_shards`, but those with tensors of `layers`. `stored_names` translate the names
    of the result; None leaves them as they are stored.

    Raises:
        CheckpointError: There are faults; all are listed.
    """
    missing = {shard for shard in shards if may_lack_shards and not (folder / shard).is_file()}
    headers, faults = _read_headers(folder, [shard for shard in shards if shard not in missing])
    names = stored_names or StoredNames()
    absent = {names.own(name): shard for name, shard in (weight_map or {}).items() if shard in missing}
    faults += find_header_faults(headers, weight_map)
    faults += _find_missed_shards(absent, layers)
    if faults:
        raise faulty_checkpoint(folder, faults)
    return TensorIndex.of(folder, chain.from_iterable(headers.values()), absent, names)


def _read_headers(
    folder: Path, shards: Sequence[str]
) -> tuple[dict[str, tuple[TensorEntry, ...]], list[str]]:
    """Return the sound headers by shard, and all faults."""
    headers: dict[str, tuple[TensorEntry, ...]] = {}
    faults = []
    for shard in shards:
        if not (folder / shard).is_file():
            faults.append(f"shard {shard} is missing")
            continue
        try:
            headers[shard] = read_shard_header(folder / shard)
        except CheckpointError as error:
            faults.append(f"{error.what} ({error.found})")
    return headers, faults


def read_shard_header(path: Path) -> tuple[TensorEntry, ...]:
    """Read the tensors of one file of a checkpoint, safetensors or PyTorch's; raise CheckpointError for any other."""
    if path.suffix == SAFETENSORS_SUFFIX:
        return read_header(path)
    if path.suffix in PICKLED_SUFFIXES:
        # This import needs torch, which safetensors files do not.
        from minimax_tools.checkpoint.pickled import read_pickled_header

        return read_pickled_header(path)
    raise CheckpointError(
        f"{path} is not a shard that mm2 can read",
        expected=", ".join((SAFETENSORS_SUFFIX, *PICKLED_SUFFIXES)),
        found=path.suffix or "no suffix",
        next_step="Give a file of the checkpoint's index.",
    )


def _find_weight_map(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_FILE
    return read_weight_map(path) if path.exists() else None


def _find_shards(folder: Path) -> list[str]:
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if not shards:
        refuse_pickled_module(folder)
        refuse_gguf(folder)
        raise CheckpointError(
            f"no checkpoint at {folder}",
            expected="safetensors shards",
            found="none in the folder" if folder.is_dir() else "no such folder",
            next_step="Give --model a folder or a hub id, or make one: mm2-split synthesize --output DIR.",
        )
    return shards


def _find_missed_shards(absent: Mapping[str, str], layers: range | None) -> list[str]:
    """Describe the missing shards that hold tensors of the layers to be read."""
    missed: dict[str, set[int]] = {}
    for name, shard in absent.items():
        layer = layer_of(name)
        if layers is not None and layer is not None and layer in layers:
            missed.setdefault(shard, set()).add(layer)
    return [
        f"shard {shard} is missing, which holds tensors of layer {', '.join(map(str, sorted(held_layers)))}"
        for shard, held_layers in sorted(missed.items())
    ]


def _describe_layers(layers: tuple[int, ...]) -> str:
    if not layers:
        return "no decoder layer"
    return f"{len(layers)} decoder layers between {layers[0]} and {layers[-1]}"


def find_scale(index: TensorIndex, entry: TensorEntry) -> TensorEntry:
    """Find the block scales of an FP8 weight; raise CheckpointError if there are none that fit."""
    name = scale_name(entry.name)
    if name not in index:
        raise CheckpointError(
            f"{entry.name} in {entry.file} is FP8 without scales",
            expected=f"a tensor {name}",
            found="none in any shard",
            next_step="Without scales the values are unknown: fetch the shard that holds them.",
        )
    scale = index[name]
    expected = scale_shape(entry.shape)
    if len(entry.shape) != 2 or scale.shape != expected or scale.dtype not in _SCALE_DTYPES:
        raise CheckpointError(
            f"{name} in {scale.file} does not fit its weight {list(entry.shape)}",
            expected=f"torch.float32 or torch.bfloat16 {list(expected)}, one scale per 128 × 128 block",
            found=f"{scale.dtype} {list(scale.shape)}",
            next_step="Use a checkpoint quantised in blocks of 128 × 128.",
        )
    return scale

"""WeightFiles: which files of a checkpoint hold its weights, told by their names, in a folder or on the hub."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.checkpoint.index import INDEX_FILE

PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_SUFFIX = ".safetensors"

# Others of that ending, such as training_args.bin and optimizer.bin, hold no weights.
_PICKLED_FILE = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")

# How shards are named, as in model-00001-of-00004.safetensors.
_NUMBERED = re.compile(r"-of-([0-9]+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The files that hold a checkpoint's weights: safetensors where there are any, else PyTorch's `.bin`.

    Args:
        index_file: Name of the index; None where the checkpoint has none.
        shards: Names of the weight files that are there, sorted; where there is an index, it decides.
    """

    index_file: str | None
    shards: tuple[str, ...]

    @classmethod
    def in_folder(cls, folder: Path) -> WeightFiles | None:
        """The weight files that lie in a folder, or whose index does; None where there are none."""
        return cls.among([path.name for path in folder.iterdir() if path.is_file()])

    @classmethod
    def among(cls, names: Collection[str]) -> WeightFiles | None:
        """The weight files among the names of a checkpoint's files; None where there are none."""
        safetensors = sorted(name for name in names if name.endswith(SAFETENSORS_SUFFIX) and "/" not in name)
        pickled = cls.pickled_among(names)
        # A folder that was fetched without its safetensors may well hold their index.
        if safetensors or (INDEX_FILE in names and (pickled is None or not pickled.shards)):
            if INDEX_FILE in names:
                return cls(index_file=INDEX_FILE, shards=tuple(safetensors))
            # Beside it lie adapters, and copies under other names.
            whole = SAFETENSORS_FILE in safetensors
            return cls(index_file=None, shards=(SAFETENSORS_FILE,) if whole else tuple(safetensors))
        return pickled

    @classmethod
    def pickled_among(cls, names: Collection[str]) -> WeightFiles | None:
        """The same, where safetensors are not looked at."""
        shards = tuple(sorted(name for name in names if _PICKLED_FILE.fullmatch(name)))
        index_file = PICKLED_INDEX_FILE if PICKLED_INDEX_FILE in names else None
        return cls(index_file=index_file, shards=shards) if shards or index_file else None

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are spread over files: there is an index, several files, or one of several."""
        return self.index_file is not None or len(self.shards) > 1 or any(map(_is_one_of_many, self.shards))


def _is_one_of_many(name: str) -> bool:
    match = _NUMBERED.search(name)
    return match is not None and int(match[1]) > 1

"""SliceDescription: the content of slice.json, with the digests that tie a slice to its source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minimax_tools.errors import CheckpointError
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import read_own_json

SLICE_FILE = "slice.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDescription:
    """The parts and tensors of a slice.

    Layers, embedding and head are None if the tensors were chosen one by one.
    """

    node: str  # name of its node
    layers: range | None  # its decoder layers
    has_embedding: bool | None  # True if it holds the embedding
    has_head: bool | None  # True if it holds the final norm and the lm_head
    source: str  # the checkpoint it was cut from: a folder as it was given, or a hub id
    # The sha256 of each of its tensors by name, over the bytes as stored; None if it was not computed.
    tensors: Mapping[str, str | None] = field(repr=False)

    def write(self, folder: Path) -> None:
        """Write `slice.json` into the folder; an older one is replaced."""
        with whole_file(folder / SLICE_FILE) as file:
            json.dump({"schema_version": SCHEMA_VERSION, **encode(self)}, file, indent=1)
            file.write("\n")

    @classmethod
    def read(cls, folder: Path) -> SliceDescription:
        """Read the folder's `slice.json`.

        Raises:
            CheckpointError: There is none, or it is damaged or of another version.
        """
        path = folder / SLICE_FILE
        try:
            record = read_own_json(path)
            version = decode(int, record["schema_version"])
            # Another version may have other fields. `decode` ignores the key of the version.
            description = decode(cls, record) if version == SCHEMA_VERSION else None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder} holds no slice",
                expected=f"a folder with {SLICE_FILE}",
                found=str(error),
                next_step="Make one: mm2-split extract.",
            ) from error
        if description is None:
            raise CheckpointError(
                f"{path} is of another version",
                expected=str(SCHEMA_VERSION),
                found=str(version),
                next_step="Make the slice again: mm2-split extract.",
            )
        return description

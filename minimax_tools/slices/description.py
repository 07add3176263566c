"""slice.json: what a slice's folder says of itself, and the digests that tie it to its source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minimax_tools.errors import CheckpointError
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.whole_file import whole_file

SLICE_FILE = "slice.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDescription:
    """What a slice holds.

    Args:
        node: Whose it is.
        layers: Its decoder layers; None where tensors were chosen one by one, as are the next two.
        has_embedding: Whether it holds the embedding.
        has_head: Whether it holds the final norm and the lm_head.
        source: The checkpoint it was cut from: a folder as it was given, or a hub id.
        tensors: By name the sha256 of the bytes, one element after the other; None where nobody computed it.
    """

    node: str
    layers: range | None
    has_embedding: bool | None
    has_head: bool | None
    source: str
    tensors: Mapping[str, str | None] = field(repr=False)

    def write(self, folder: Path) -> None:
        """Write `slice.json` into the folder, in place of one that is there."""
        with whole_file(folder / SLICE_FILE) as file:
            json.dump({"schema_version": SCHEMA_VERSION, **encode(self)}, file, indent=1)
            file.write("\n")

    @classmethod
    def read(cls, folder: Path) -> SliceDescription:
        """Read the folder's `slice.json`.

        Raises:
            CheckpointError: The folder has none, or it is damaged or of another version.
        """
        path = folder / SLICE_FILE
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            version = record["schema_version"]
            description = decode(cls, record)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder} holds no slice",
                expected=f"a folder with {SLICE_FILE}",
                found=str(error),
                next_step="Cut it out: mm2-split extract.",
            ) from error
        if version != SCHEMA_VERSION:
            raise CheckpointError(
                f"{path} is of another version", expected=str(SCHEMA_VERSION), found=str(version)
            )
        return description

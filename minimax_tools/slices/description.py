"""SliceDescription: the content of slice.json, with the digests that tie a slice to its source: sha256 of tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.errors import CheckpointError
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import read_own_json

DEFAULT_FOLDER = Path("model_shards")
SLICE_FILE = "slice.json"
PTH_FILE = "model.pth"
SCHEMA_VERSION = 1
_BUFFER_BYTES = 1 << 20


class FileFormat(Enum):
    """Format of a slice's weight files."""

    SAFETENSORS = "safetensors"
    PTH = "pth"


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
        # Loaded here: the help of commands names the folder and the formats of slices.
        from minimax_tools.json_codec import encode

        with whole_file(folder / SLICE_FILE) as file:
            json.dump({"schema_version": SCHEMA_VERSION, **encode(self)}, file, indent=1)
            file.write("\n")

    @classmethod
    def read(cls, folder: Path) -> SliceDescription:
        """Read the folder's `slice.json`.

        Raises:
            CheckpointError: There is none, or it is damaged or of another version.
        """
        from minimax_tools.json_codec import decode_version

        try:
            record = read_own_json(folder / SLICE_FILE)
            return decode_version(cls, record, version=SCHEMA_VERSION)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder} holds no slice",
                expected=f"a folder with {SLICE_FILE}",
                found=str(error),
                next_step="Make one: mm2-split extract.",
            ) from error


def digest_tensors(entries: Iterable[TensorEntry]) -> dict[str, str]:
    """Compute the sha256 of tensors by name; it is equal for a safetensors and a `.bin` copy.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    digests = {}
    for entry in entries:
        digest = hashlib.sha256()
        for piece in read_pieces(entry):
            digest.update(piece)
        digests[entry.name] = digest.hexdigest()
    return digests


def read_pieces(entry: TensorEntry) -> Iterator[memoryview]:
    """Yield a tensor's bytes as a safetensors file holds them, in pieces; that of a `.bin` file comes whole.

    A piece is valid until the next one is asked for.

    Raises:
        CheckpointError: The tensor cannot be read.
    """
    if entry.is_pickled:
        # This import needs torch, which safetensors files do not.
        from minimax_tools.slices.torch_values import read_bytes

        yield read_bytes(entry)
        return
    buffer = memoryview(bytearray(min(entry.size_bytes, _BUFFER_BYTES)))
    remaining = entry.size_bytes
    try:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            while remaining and (count := file.readinto(buffer[: min(remaining, len(buffer))])):
                yield buffer[:count]
                remaining -= count
    except OSError as error:
        raise _unreadable(entry, str(error)) from error
    if remaining:
        raise _unreadable(entry, f"an end of the file {remaining} bytes too early")


def describe_shape(entry: TensorEntry) -> str:
    """Return dtype and shape, which a digest of the bytes does not cover, such as `torch.bfloat16 [64, 32]`."""
    return f"{entry.dtype} {list(entry.shape)}"


def _unreadable(entry: TensorEntry, found: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.name} cannot be read from {entry.file}", found=found, next_step="Fetch the file again."
    )

"""ReadRecord: the tensors that one node read of a checkpoint, written by a run, checked by `mm2-split verify`.

In a run on several machines, each rank computes one node's slice of a plan. Before each layer that it writes, it
writes `read_records/{node}.json` in the capture directory anew. A run that was killed and resumed has one record of
all its attempts: a tensor's bytes count in `bytes_read` for the first attempt that reads it, and in `bytes_read_again`
for later ones. What a killed attempt read after its last record, and attempts by another plan, are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from minimax_tools.errors import CannotRunError, shorten
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import read_own_json

RECORDS_FOLDER = "read_records"
# More than any disk holds: a damaged file may give any number.
_MOST_BYTES = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecord:
    """The tensors that one node read; the table above describes the fields."""

    node: str
    tensors: tuple[str, ...]
    bytes_read: int
    bytes_asked: int
    bytes_read_again: int = 0
    plan: str = ""

    def __post_init__(self) -> None:
        for name in ("bytes_read", "bytes_asked", "bytes_read_again"):
            if not 0 <= getattr(self, name) <= _MOST_BYTES:
                raise ValueError(f"{name} is {shorten(str(getattr(self, name)))}")

    @classmethod
    def begun(cls, node: str, *, plan: str = "") -> ReadRecord:
        """Begin the record of a node that has read nothing yet; `plan` is the digest of its plan."""
        return cls(node=node, tensors=(), bytes_read=0, bytes_asked=0, plan=plan)

    def followed_by(self, sizes: Mapping[str, int], bytes_read: Mapping[str, int]) -> ReadRecord:
        """Add what one more attempt read: sizes of the tensors that it opened, and the bytes read of each, by name."""
        before = frozenset(self.tensors)
        new = sizes.keys() - before
        bytes_again = sum(num_bytes for name, num_bytes in bytes_read.items() if name in before)
        return replace(
            self,
            tensors=tuple(sorted(before | new)),
            bytes_read=self.bytes_read + sum(bytes_read[name] for name in new),
            bytes_asked=self.bytes_asked + sum(sizes[name] for name in new),
            bytes_read_again=self.bytes_read_again + bytes_again,
        )

    def write(self, folder: Path) -> Path:
        """Write the record as `{node}.json` into a folder, made if only its parent exists, and return its path."""
        path = folder / f"{self.node}.json"
        try:
            # Not its parents: a capture directory that was removed must not come back without its manifest.
            folder.mkdir(exist_ok=True)
            with whole_file(path) as file:
                file.write(json.dumps(encode(self), indent=1) + "\n")
        except OSError as error:
            raise CannotRunError(
                f"cannot write the read record {path}",
                found=error.strerror or str(error),
                next_step="Mend that, or choose another --output-dir.",
            ) from error
        return path

    @classmethod
    def read(cls, path: Path) -> ReadRecord:
        """Read a record."""
        try:
            return decode(cls, read_own_json(path))
        except (OSError, ValueError) as error:
            raise CannotRunError(
                f"{path} is no read record", found=str(error), next_step="Write it anew: run the rank again."
            ) from error


def remove_records(directory: Path) -> None:
    """Remove the records in a capture directory."""
    for path in (directory / RECORDS_FOLDER).glob("*.json"):
        path.unlink(missing_ok=True)


def read_records(folder: Path, nodes: Iterable[str]) -> dict[str, ReadRecord]:
    """Read the records of these nodes, by node; nodes without a record are left out.

    `folder` holds the records, or is a capture directory with `read_records` in it.

    Raises:
        CannotRunError: A file is no record, or the record of another node.
    """
    inner = folder / RECORDS_FOLDER
    if inner.is_dir():
        folder = inner
    records = {}
    for node in nodes:
        path = folder / f"{node}.json"
        if not path.is_file():
            continue
        records[node] = ReadRecord.read(path)
        if records[node].node != node:
            raise CannotRunError(
                f"{path} is the record of another node", expected=node, found=records[node].node
            )
    return records

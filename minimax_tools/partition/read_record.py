"""ReadRecord: what one node read of a checkpoint, written by a run and checked by `mm2-split verify`.

A run writes one file per rank, `read_records/{node}.json` in its capture directory:

    {"node": "a", "tensors": ["lm_head.weight", …], "bytes_read": 1024, "bytes_asked": 1024, "files": {"…": 1024}}

| key | what it holds |
|---|---|
| `node` | the node's name in the plan |
| `tensors` | names of the tensors that were opened, each once |
| `bytes_read` | bytes of tensors that came from the files, headers aside; what was read twice counts twice |
| `bytes_asked` | sizes of those tensors, each counted once |
| `files` | bytes read by file name; may be left out |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minimax_tools.errors import CannotRunError

RECORDS_FOLDER = "read_records"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecord:
    """What one node read.

    Args:
        node: Its name.
        tensors: The tensors it opened, sorted.
        bytes_read: Bytes that came from the files.
        bytes_asked: Sizes of these tensors.
        files: Bytes read by file name; empty where nobody counted.
    """

    node: str
    tensors: tuple[str, ...]
    bytes_read: int
    bytes_asked: int
    files: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, node: str, sizes: Mapping[str, int], *, bytes_read: int, files: Mapping[str, int] | None = None
    ) -> ReadRecord:
        """The record of a run that opened tensors of these sizes, in bytes by name."""
        return cls(
            node=node,
            tensors=tuple(sorted(sizes)),
            bytes_read=bytes_read,
            bytes_asked=sum(sizes.values()),
            files=dict(files or {}),
        )

    def write(self, folder: Path) -> Path:
        """Write the record as `{node}.json` into a folder, which is made where there is none; gives its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.node}.json"
        values = {
            "node": self.node,
            "tensors": list(self.tensors),
            "bytes_read": self.bytes_read,
            "bytes_asked": self.bytes_asked,
            "files": dict(self.files),
        }
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
        return path

    @classmethod
    def read(cls, path: Path) -> ReadRecord:
        """Read a record that `write` wrote.

        Raises:
            CannotRunError: The file is no such record.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                node=str(values["node"]),
                tensors=tuple(map(str, values["tensors"])),
                bytes_read=int(values["bytes_read"]),
                bytes_asked=int(values["bytes_asked"]),
                files={str(name): int(count) for name, count in values.get("files", {}).items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CannotRunError(
                f"{path} is no read record", found=repr(error), next_step="Write it anew: run the rank again."
            ) from error


def read_records(folder: Path, nodes: Iterable[str]) -> dict[str, ReadRecord]:
    """The records that a folder holds for these nodes, by node.

    Args:
        folder: Of the records, or a capture directory that holds `read_records`.
        nodes: Their names.

    Raises:
        CannotRunError: A file is no record, or the record of another node.
    """
    inner = folder / RECORDS_FOLDER
    place = inner if inner.is_dir() else folder
    records = {node: ReadRecord.read(path) for node in nodes if (path := place / f"{node}.json").is_file()}
    for node, record in records.items():
        if record.node != node:
            raise CannotRunError(
                f"{place / node}.json is the record of another node", expected=node, found=record.node
            )
    return records

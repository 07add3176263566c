"""ReadRecord: what one node read of a checkpoint, written by a run and checked by `mm2-split verify`.

A run writes one file per rank, `read_records/{node}.json` in its capture directory, anew before each layer it writes:

    {"node": "a", "tensors": ["lm_head.weight", …], "bytes_read": 1024, "bytes_asked": 1024}

| key | what it holds |
|---|---|
| `node` | the node's name in the plan |
| `tensors` | names of the tensors that were opened, each once |
| `bytes_read` | bytes of tensors that came from the files, headers aside; what was read twice counts twice |
| `bytes_asked` | sizes of those tensors, each counted once |
| `bytes_read_again` | bytes that a resumed run read of tensors which an attempt before it had read |
| `plan` | digest of the plan that the run went by; empty where none is known |

A run that was killed and resumed has one record of all its attempts. A tensor's bytes count in `bytes_read` in the
first attempt that read it, twice if it read it twice; whatever a later attempt reads of it counts in
`bytes_read_again` alone. So `bytes_read` over the slice's size is 1 for a run that read everything once, however often
it was killed, and what the killing cost stands beside it. What an attempt read that was killed before it wrote a layer
is not known. Attempts by another plan are not added up: a capture that was begun by one has no whole record.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from minimax_tools.errors import CannotRunError
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.whole_file import whole_file

RECORDS_FOLDER = "read_records"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecord:
    """What one node read.

    Args:
        node: Its name.
        tensors: The tensors it opened, sorted.
        bytes_read: Bytes that came from the files.
        bytes_asked: Sizes of these tensors.
        bytes_read_again: Bytes that a resumed run read of what an attempt before it had read.
        plan: Digest of the plan.
    """

    node: str
    tensors: tuple[str, ...]
    bytes_read: int
    bytes_asked: int
    bytes_read_again: int = 0
    plan: str = ""

    @classmethod
    def of(cls, node: str, sizes: Mapping[str, int], *, bytes_read: int) -> ReadRecord:
        """The record of a run that opened tensors of these sizes, in bytes by name."""
        return cls(
            node=node,
            tensors=tuple(sorted(sizes)),
            bytes_read=bytes_read,
            bytes_asked=sum(sizes.values()),
        )

    @classmethod
    def begun(cls, node: str, *, plan: str) -> ReadRecord:
        """The record of a node that read nothing yet, of a run by the plan of this digest."""
        return cls(node=node, tensors=(), bytes_read=0, bytes_asked=0, plan=plan)

    def followed_by(self, sizes: Mapping[str, int], bytes_read: Mapping[str, int]) -> ReadRecord:
        """This record with what one more attempt read.

        Args:
            sizes: Bytes of each tensor that the attempt opened, by name.
            bytes_read: Bytes that it read of each, by name.
        """
        known = frozenset(self.tensors)
        new = sizes.keys() - known
        return replace(
            self,
            tensors=tuple(sorted(known | new)),
            bytes_read=self.bytes_read + sum(bytes_read[name] for name in new),
            bytes_asked=self.bytes_asked + sum(sizes[name] for name in new),
            bytes_read_again=self.bytes_read_again
            + sum(count for name, count in bytes_read.items() if name in known),
        )

    def write(self, folder: Path) -> Path:
        """Write the record as `{node}.json` into a folder, which is made where there is none; gives its path.

        Raises:
            CannotRunError: It cannot be written.
        """
        path = folder / f"{self.node}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
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
        """Read a record that `write` wrote.

        Raises:
            CannotRunError: The file is no such record.
        """
        try:
            return decode(cls, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise CannotRunError(
                f"{path} is no read record", found=str(error), next_step="Write it anew: run the rank again."
            ) from error


def remove_records(directory: Path) -> None:
    """Remove the records that lie in a capture directory."""
    for path in (directory / RECORDS_FOLDER).glob("*.json"):
        path.unlink(missing_ok=True)


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

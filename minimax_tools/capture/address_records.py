"""Records of addresses: the small JSON files of the cache that say which address a folder stands for.

| file | record |
|---|---|
| `<cache>/captures/NAME-DIGEST/.address.json` | `MirrorRecord` |
| `<cache>/outputs/NAME-DIGEST/.output.json` | `OutputRecord` |
| `<cache>/addresses/DIGEST.json` | `NewestRecord` |

Any of them may be damaged. Then it cannot be read, and what it told is asked for anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.remote.address import RemoteAddress
from minimax_tools.remote.cache import ADDRESS_NAME

# Beside the folder of a run that is put at an address once it is whole (`remote_output`).
OUTPUT_NAME = ".output.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorRecord:
    """The address of the capture that a folder mirrors."""

    address: RemoteAddress  # at the commit that the manifest is of, if the server has commits
    asked: RemoteAddress  # as it was asked for

    @classmethod
    def read(cls, directory: Path) -> MirrorRecord:
        """Read the record in a mirror's folder.

        Raises:
            OSError: There is none, or it cannot be read.
            ValueError: It is damaged.
        """
        return decode(cls, read_own_json(directory / ADDRESS_NAME))

    def write(self, directory: Path) -> None:
        """Write the record into a mirror's folder."""
        with whole_file(directory / ADDRESS_NAME) as file:
            json.dump(encode(self), file)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRecord:
    """The address that a run is put at once it is whole."""

    asked: RemoteAddress

    @classmethod
    def read(cls, place: Path) -> OutputRecord:
        """Read the record in the folder around a run; raise as `MirrorRecord.read` does."""
        return decode(cls, read_own_json(place / OUTPUT_NAME))

    def write(self, place: Path) -> None:
        """Write the record into the folder around a run."""
        with whole_file(place / OUTPUT_NAME) as file:
            json.dump(encode(self), file)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestRecord:
    """The mirror of what an address named when it was asked for last."""

    directory: str
    tag: str  # of the manifest there, which changes with it

    @classmethod
    def find(cls, path: Path) -> NewestRecord | None:
        """Read the record of an address; None if there is none, or it is damaged."""
        try:
            return decode(cls, read_own_json(path))
        except (OSError, ValueError):
            return None

    def write(self, path: Path) -> None:
        """Write the record of an address; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            json.dump(encode(self), file)


def address_of(directory: Path) -> str:
    """Return the address that a folder stands for, a mirror's or that of a run to be put; of others their path."""
    for kind, place in ((MirrorRecord, directory), (OutputRecord, directory.parent)):
        try:
            return str(kind.read(place).asked)
        except (OSError, ValueError):
            continue
    return str(directory)

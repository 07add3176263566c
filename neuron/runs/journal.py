"""Journal: the finished probes of a bisection in a file, from which an interrupted bisection resumes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.capture.manifest import Description
from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import (
    LOCK_NAME,
    is_temporary,
    locked_directory,
    remove_temporaries,
    whole_capture_file,
)
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.model.span import Span
from minimax_tools.results.probes import Probe

logger = logging.getLogger(__name__)

JOURNAL_NAME = "bisection.json"
_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """The version of a journal's form."""

    schema_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The content of a journal."""

    schema_version: int = _SCHEMA_VERSION
    description: Description
    probes: tuple[Probe, ...]


class Journal:
    """The probes of one bisection; `description` holds all that their results depend on, such as port and golden."""

    def __init__(self, directory: Path, description: Description, probes: tuple[Probe, ...]) -> None:
        self._directory = directory
        self._description = description
        self._probes = {probe.span: probe for probe in probes}

    def find(self, span: Span) -> Probe | None:
        """Return the probe of these layers; None if it has not run."""
        return self._probes.get(span)

    def add(self, probe: Probe) -> None:
        """Add a finished probe, and write the file.

        Raises:
            CaptureError: The disk is full, or cannot be written to.
        """
        self._probes[probe.span] = probe
        self._write()

    def _write(self) -> None:
        record = encode(_Record(description=self._description, probes=tuple(self._probes.values())))
        with whole_capture_file(self._directory / JOURNAL_NAME) as temporary:
            temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def open_journal(directory: Path, description: Description, *, is_anew: bool) -> Iterator[Journal]:
    """Open the journal in `directory`, with the probes of earlier runs that have the same description.

    The folder is created if it is missing, and locked during the block. With `is_anew`, earlier probes are dropped.

    Raises:
        CaptureError: Another process writes there, the directory holds something else, or cannot be written to.
    """
    with locked_directory(directory):
        remove_temporaries(directory)
        _refuse_foreign(directory)
        probes = () if is_anew else _read_probes(directory / JOURNAL_NAME, description)
        journal = Journal(directory, description, probes)
        # Before any probe runs: a disk that cannot be written to is reported at once.
        journal._write()
        yield journal


def _refuse_foreign(directory: Path) -> None:
    own_names = (LOCK_NAME, JOURNAL_NAME)
    foreign_names = sorted(
        path.name for path in directory.iterdir() if path.name not in own_names and not is_temporary(path)
    )
    if foreign_names:
        raise CaptureError(
            f"{directory} holds something other than a bisection",
            found=", ".join(foreign_names[:3]),
            next_step="Choose another --output-dir.",
        )


def _read_probes(path: Path, description: Description) -> tuple[Probe, ...]:
    """Read the probes to resume from; return () and log why if an existing journal cannot be resumed."""
    if not path.exists():
        return ()
    try:
        record = read_own_json(path)
        # Another version may store probes in another form.
        is_same_version = decode(_Version, record).schema_version == _SCHEMA_VERSION
        kept = decode(_Record, record) if is_same_version else None
    except (OSError, ValueError) as error:
        logger.warning("Starting anew: %s cannot be read (%s).", path, error)
        return ()
    if kept is None:
        logger.info("Starting anew in %s: another version of mm2 wrote the journal there.", path.parent)
        return ()
    if differing := kept.description.differences(description):
        logger.info(
            "Starting anew in %s: the bisection there has other %s.", path.parent, ", ".join(differing)
        )
        return ()
    if kept.probes:
        logger.info("Resuming %s: %d probes were run before.", path.parent, len(kept.probes))
    return kept.probes

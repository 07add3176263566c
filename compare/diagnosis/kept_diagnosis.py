"""KeptDiagnosis: the latest diagnosis of a run, kept in the run's folder, so that `--prove` need not search again.

Port source: tells whether a port's file has changed since its run, without executing it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from compare.catalogue.words import Place, read_words
from compare.diagnosis.finding import Diagnosis
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.json_codec import DecodeError, decode, encode
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import read_json
from minimax_tools.provenance import digest_sources

logger = logging.getLogger(__name__)


# A new run into the folder removes it, like every file of the capture.
_FILE_NAME = "diagnosis.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisQuestion:
    """The question that a diagnosis answers: the same question has the same answer."""

    golden: str  # sha256 of the golden's manifest
    run: str  # sha256 of the run's manifest
    places: tuple[str, str]  # the two folders, as they were named
    model: str  # the checkpoint, as it was named
    layers: tuple[int, ...] | None  # the layers that were asked for; None for those to blame
    mistakes: tuple[str, ...]  # the mistakes that were asked for; () for all
    catalogue: str  # sha256 of the names of all known mistakes

    @classmethod
    def of(
        cls,
        reference: CaptureSource,
        target: CaptureSource,
        *,
        model: str,
        layers: tuple[int, ...] | None,
        mistakes: tuple[str, ...],
    ) -> DiagnosisQuestion | None:
        """Return the question about two captures; None if mm2 did not write both."""
        if reference.known_description is None or target.known_description is None:
            return None
        names = " ".join((*read_words(Place.LAYER), *read_words(Place.OUTSIDE)))
        return cls(
            golden=_digest_manifest(reference),
            run=_digest_manifest(target),
            places=(str(reference.directory), str(target.directory)),
            model=model,
            layers=layers,
            mistakes=mistakes,
            catalogue=hashlib.sha256(names.encode()).hexdigest(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDiagnosis:
    """A diagnosis with its question."""

    question: DiagnosisQuestion
    diagnosis: Diagnosis

    def keep(self, run: Path) -> None:
        """Write it into the run's folder; a folder that cannot be written to keeps none."""
        try:
            with whole_file(run / _FILE_NAME) as file:
                json.dump(encode(self), file)
        except OSError as error:
            logger.debug("The diagnosis was not kept: %s", error)

    @classmethod
    def find(cls, run: Path, question: DiagnosisQuestion) -> Diagnosis | None:
        """Read the diagnosis that answers a question from the run's folder; None if there is none."""
        try:
            kept = decode(cls, read_json(run / _FILE_NAME))
        except (OSError, ValueError, DecodeError) as error:
            logger.debug("No diagnosis was kept: %s", error)
            return None
        return kept.diagnosis if kept.question == question else None


def _digest_manifest(capture: CaptureSource) -> str:
    return hashlib.sha256((capture.directory / MANIFEST_NAME).read_bytes()).hexdigest()


def has_changed(run: CaptureSource) -> bool:
    """Decide whether the file of a run's port has changed since the run.

    False if it cannot be told: the port is no file, or lies elsewhere, or mm2 did not make the run. The digest of a run
    covers the modules that the port imports too, which are not known here. So a file with another digest counts as
    changed only if it is also newer than the run.
    """
    description = run.known_description
    if description is None or not description.provenance.target_digest:
        return False
    file = Path(description.provenance.target.rpartition(":")[0])
    if file.suffix != ".py" or not file.is_file():
        return False
    if digest_sources({file.name: file}) == description.provenance.target_digest:
        return False
    return file.stat().st_mtime > (run.directory / MANIFEST_NAME).stat().st_mtime


def note_change(run: CaptureSource) -> tuple[str, ...]:
    """Note that the port's file has changed since the run."""
    description = run.known_description
    if description is None or not has_changed(run):
        return ()
    return (
        f"{description.provenance.target} has changed since the run: the diagnosis is of the port as it was. "
        "Run the port again, and diagnose that run.",
    )

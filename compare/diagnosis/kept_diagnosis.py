"""KeptDiagnosis: the latest diagnosis of a run, kept in the run's folder, so that `--prove` need not search again."""

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
class KeptDiagnosis:
    """A diagnosis with the digest of its question: the same question has the same answer."""

    question: str
    diagnosis: Diagnosis

    def keep(self, run: Path) -> None:
        """Write it into the run's folder; a folder that cannot be written to keeps none."""
        try:
            with whole_file(run / _FILE_NAME) as file:
                json.dump(encode(self), file)
        except OSError as error:
            logger.debug("The diagnosis was not kept: %s", error)

    @classmethod
    def find(cls, run: Path, question: str) -> Diagnosis | None:
        """Read the diagnosis that answers a question from the run's folder; None if there is none."""
        try:
            kept = decode(cls, read_json(run / _FILE_NAME))
        except (OSError, ValueError, DecodeError) as error:
            logger.debug("No diagnosis was kept: %s", error)
            return None
        return kept.diagnosis if kept.question == question else None


def digest_question(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    model: str,
    layers: tuple[int, ...] | None,
    mistakes: tuple[str, ...],
) -> str | None:
    """Return the digest of all that a diagnosis depends on; None if mm2 did not write both captures."""
    if reference.known_description is None or target.known_description is None:
        return None
    sides = [
        (str(side.directory), (side.directory / MANIFEST_NAME).read_bytes()) for side in (reference, target)
    ]
    known = [(place, *read_words(place)) for place in (Place.LAYER, Place.OUTSIDE)]
    return hashlib.sha256(repr((sides, model, layers, mistakes, known)).encode()).hexdigest()


def has_changed(run: CaptureSource) -> bool:
    """Decide whether the file of a run's port has changed since the run; False if that cannot be told.

    The digest of a run covers the modules that the port imports too, which are not known here. So a file with another
    digest counts as changed only if it is also newer than the run.
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


def note_change(diagnosis: Diagnosis, run: CaptureSource) -> tuple[str, ...]:
    """Note that the port has changed since the run: by the source that its proofs ran, or without any by its file."""
    description = run.known_description
    if description is None:
        return ()
    was = description.provenance
    proofs = [finding.proof for finding in diagnosis.findings if finding.proof is not None]
    if was.target_digest and {proof.target_digest for proof in proofs} - {"", was.target_digest}:
        return (f"the source of {was.target} has changed since the run: the proofs are of what it is now",)
    if proofs or not has_changed(run):
        return ()
    return (
        f"{was.target} has changed since the run: the diagnosis is of the port as it was. "
        "Run the port again, and diagnose that run.",
    )

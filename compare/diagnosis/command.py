"""`mm2-diagnose` at work: a run diagnosed, and its mistakes proved.

KeptDiagnosis: the latest diagnosis of a run, kept in the run's folder, so that `--prove` need not search again.

Port source: tells whether a port's file has changed since its run, without executing it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from compare.comparer import JudgedRun
from compare.diagnosis.catalogue.catalogue import CATALOGUE
from compare.diagnosis.diagnose import diagnose
from compare.diagnosis.finding import Diagnosis
from compare.diagnosis.model.search import MODEL_CATALOGUE
from compare.diagnosis.proof.proving import prove_diagnosis
from compare.diagnosis.report import (
    catalogue_record,
    diagnosis_record,
    render_catalogue,
    render_diagnosis,
    render_nothing_to_prove,
)
from compare.next_commands import after_diagnosis
from compare.options import NamedSides
from compare.run_report import print_then_report, report_run
from compare.sides.pairing import select_layers
from minimax_tools.capture.run_commands import RunCommands
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.command_line.console import end_command, print_json, print_text
from minimax_tools.errors import UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config
from minimax_tools.json_codec import DecodeError, decode, encode
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import read_json
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.model.spec import ModelSpec
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
        names = " ".join((*CATALOGUE, *MODEL_CATALOGUE))
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


def diagnose_sides(
    model: str | None,
    sides: NamedSides,
    layer_pattern: str | None,
    mistakes: tuple[str, ...],
    lists_catalogue: bool,
    proves: bool,
    port: str | None,
    report_path: Path | None,
    as_json: bool,
) -> None:
    """Diagnose a run, prove the findings if asked to, print, and end with the exit code."""
    if lists_catalogue:
        if as_json:
            print_json(catalogue_record(), next_commands=())
        else:
            print_text(render_catalogue(), next_commands=())
        return
    if model is None:
        raise UsageError(
            "no checkpoint was named", next_step="Give --model the one that the golden was made of."
        )
    # A model that mm2 does not know is refused before anything is judged.
    ModelSpec.from_folder(resolve_config(model))
    reference, target = sides.open()
    # None stands for the layers that the comparison blames; --layer comes as a pattern too.
    layers = None if layer_pattern is None else select_layers(reference, target, layer_pattern)
    question = DiagnosisQuestion.of(reference, target, model=model, layers=layers, mistakes=mistakes)
    kept = KeptDiagnosis.find(target.directory, question) if proves and question and not report_path else None
    # A report draws the comparison too, which a kept diagnosis does not hold.
    judged: list[JudgedRun] = []
    diagnosis = kept or diagnose(
        reference,
        target,
        model=model,
        layers=layers,
        mistakes=mistakes,
        open_progress=lambda num_layers: LayerProgress(num_layers, label="Diagnosis"),
        take_run=judged.append,
    )
    if question and kept is None:
        KeptDiagnosis(question=question, diagnosis=diagnosis).keep(target.directory)
    if proves and diagnosis.findings:
        diagnosis = prove_diagnosis(
            diagnosis,
            reference,
            target,
            model=model,
            port=port,
            open_progress=lambda num_proofs: LayerProgress(num_proofs, label="Proof"),
        )
    commands = RunCommands.of(reference, target, model=model, target=port, reading=sides.reading_arguments)
    following = after_diagnosis(diagnosis, commands, options=_chosen(layer_pattern, mistakes))
    if not proves or not diagnosis.findings:
        # Proofs note by themselves that they are of a changed port.
        diagnosis = replace(diagnosis, notes=(*diagnosis.notes, *_word_change(target)))
    report = None
    if report_path:
        report = partial(report_run, judged[0], report_path, next_commands=following, diagnosis=diagnosis)
    if as_json:
        print_json(diagnosis_record(diagnosis), next_commands=following)
        if report:
            report()
    elif proves and not diagnosis.findings and kept:
        print_text(render_nothing_to_prove(diagnosis), next_commands=following)
    else:
        text = render_diagnosis(diagnosis, proves=proves)
        print_then_report(text, report, next_commands=following)
    end_command(diagnosis.exit_code)


def _word_change(run: CaptureSource) -> tuple[str, ...]:
    """Note that the port's file has changed since the run."""
    description = run.known_description
    if description is None or not has_changed(run):
        return ()
    return (
        f"{description.provenance.target} has changed since the run: the diagnosis is of the port as it was. "
        "Run the port again, and diagnose that run.",
    )


def _chosen(layer_pattern: str | None, mistakes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the options that choose layers and mistakes, as a command takes them."""
    layers = () if layer_pattern is None else ("--layer-pattern", layer_pattern)
    return (*layers, *(word for name in mistakes for word in ("--mistake", name)))

"""RunReport: the files of `--report-path` for a judged run."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from compare.comparer import JudgedRun
from compare.diagnosis.finding import Diagnosis, confirm_causes
from compare.diagnosis.report import render_diagnosis
from compare.diagnosis.view import word_diagnosis
from compare.evidence.collection import collect_evidence
from reports.folder import WrittenReport, write_report
from reports.page.evidence import Report
from reports.page.origins import origin_rows

logger = logging.getLogger(__name__)


def report_run(
    run: JudgedRun, directory: Path, *, next_commands: tuple[str, ...], diagnosis: Diagnosis | None = None
) -> WrittenReport:
    """Write the report of a judged run into a directory, with its diagnosis if one was made.

    A warning says what was not written, and what to install for it.

    Raises:
        CannotRunError: The directory cannot be made or written to.
    """
    text = ""
    if diagnosis is not None:
        text = render_diagnosis(diagnosis, width=120, is_terminal=False)
        run = replace(run, comparison=confirm_causes(run, diagnosis))
    written = write_report(
        Report(
            comparison=run.comparison,
            next_commands=next_commands,
            evidence=collect_evidence(run),
            diagnosis=None if diagnosis is None else word_diagnosis(diagnosis),
            diagnosis_text=text,
            origins=origin_rows(run.sides.reference, run.sides.target),
        ),
        directory,
    )
    if written.missing:
        logger.warning("%s", written.missing)
    return written

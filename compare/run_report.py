"""RunReport: the files of `--report-path` for a judged run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compare.comparer import JudgedRun
from compare.diagnosis.finding import Diagnosis, confirm_causes
from compare.diagnosis.report import render_diagnosis
from compare.diagnosis.view import word_diagnosis
from compare.evidence.collection import collect_evidence
from reports.folder import write_report
from reports.page.evidence import Report
from reports.page.origins import origin_rows


def report_run(
    run: JudgedRun, directory: Path, *, next_commands: tuple[str, ...], diagnosis: Diagnosis | None = None
) -> str:
    """Write the report of a judged run, with its diagnosis if one was made, and return a line for each file.

    Raises:
        CannotRunError: The directory cannot be made or written to.
    """
    text = ""
    if diagnosis is not None:
        text = render_diagnosis(diagnosis, width=120, is_terminal=False)
        run = replace(run, comparison=confirm_causes(run, diagnosis))
    paths = write_report(
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
    return "\n".join(f"written: {path}" for path in paths)

"""Folder: the files of a report, written side by side.

| file | for |
|---|---|
| `report.html` | people: one page that needs no network |
| `report.md` | a comment on a pull request |
| `report.txt` | the same text as in the terminal |
| `junit.xml` | a build server: a case for each layer and site |
| `comparison_report.json`, `comparison_summary.json` | programs |
| `comparison.csv` | tables |
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minimax_tools.command_line.console import NEXT_TITLE, versioned
from minimax_tools.errors import CannotRunError, install_command
from minimax_tools.machine.files import whole_file
from minimax_tools.printable import printable, printable_json
from minimax_tools.results.results import Comparison
from reports.data import comparison_record, comparison_table, summary_record
from reports.junit import render_junit
from reports.markdown import render_markdown
from reports.page.diagnosed import DiagnosedRun
from reports.page.evidence import Evidence
from reports.page.html import has_library, render_page
from reports.page.origins import OriginRow
from reports.page.page import plan_page
from reports.terminal import render_comparison

PAGE_NAME = "report.html"
MARKDOWN_NAME = "report.md"
TEXT_NAME = "report.txt"
JUNIT_NAME = "junit.xml"
REPORT_NAME = "comparison_report.json"
SUMMARY_NAME = "comparison_summary.json"
TABLE_NAME = "comparison.csv"

_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The contents of a report."""

    comparison: Comparison
    next_commands: tuple[str, ...] = ()  # what to run next, each a complete line
    evidence: Evidence = field(default_factory=Evidence)
    diagnosis: DiagnosedRun | None = None  # None if none was made
    diagnosis_text: str = ""  # the same as text
    origins: tuple[OriginRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenReport:
    """The files of a report that were written."""

    paths: tuple[Path, ...]
    missing: str = ""  # sentence on what was not written, and what to install; empty if all was

    def __str__(self) -> str:
        return "\n".join(f"written: {path}" for path in self.paths)


def write_report(report: Report, directory: Path) -> WrittenReport:
    """Write all files of a report into a directory; the page only if the package that it needs is installed.

    Raises:
        CannotRunError: The directory cannot be made or written to.
    """
    comparison, commands = report.comparison, report.next_commands
    page = plan_page(
        comparison,
        next_commands=commands,
        evidence=report.evidence,
        diagnosis=report.diagnosis,
        origins=report.origins,
    )
    texts = {
        MARKDOWN_NAME: render_markdown(
            comparison, sentence=page.sentence, next_commands=commands, diagnosis=report.diagnosis
        ),
        TEXT_NAME: _terminal_text(report),
        JUNIT_NAME: render_junit(comparison, sentence=page.sentence),
        REPORT_NAME: _json_text(versioned(comparison_record(comparison), next_commands=commands)),
        SUMMARY_NAME: _json_text(versioned(summary_record(comparison), next_commands=commands)),
        TABLE_NAME: printable(comparison_table(comparison), keep="\r\n\t"),
    }
    missing = ""
    if has_library():
        texts = {PAGE_NAME: render_page(page), **texts}
    else:
        # A page of an earlier run would not fit the files beside it.
        _remove(directory / PAGE_NAME)
        missing = f"not written: {PAGE_NAME}, whose charts need a package: {install_command('report')}"
    paths = {directory / name: text for name, text in texts.items()}
    _write(paths)
    return WrittenReport(paths=tuple(paths), missing=missing)


def _terminal_text(report: Report) -> str:
    text = render_comparison(
        report.comparison, width=_WIDTH, is_terminal=False, shows_metrics=True, is_verbose=True
    )
    parts = [text, report.diagnosis_text] if report.diagnosis_text else [text]
    if report.next_commands:
        parts.append(
            "\n".join([NEXT_TITLE, *(f"  {printable(command)}" for command in report.next_commands)])
        )
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _json_text(record: Mapping[str, Any]) -> str:
    return printable_json(record) + "\n"


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _write(texts: Mapping[Path, str]) -> None:
    """Write texts as UTF-8 to paths, whose folder may be missing: all of them, or none if one cannot be written."""
    path = Path()
    try:
        with ExitStack() as files:
            for path, text in texts.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                file = files.enter_context(whole_file(path, newline=""))
                # A path may hold bytes that are no text.
                file.write(text.encode("utf-8", "replace").decode("utf-8"))
                file.flush()
        missing = [path.name for path in texts if not path.is_file()]
    except OSError as error:
        raise _cannot_write(path, error) from error
    if missing:
        raise CannotRunError(
            f"the report's {', '.join(missing)} in {path.parent} was removed while the others were written",
            next_step="Find out what else cleans up there, then run the same command again.",
        )


def _cannot_write(path: Path, error: OSError) -> CannotRunError:
    return CannotRunError(
        f"cannot write the report {path}",
        found=error.strerror or str(error),
        next_step="Choose another directory for reports, one that can be written to.",
    )

"""Folder: the files of a report, side by side.

| file | for |
|---|---|
| `report.html` | people: one page that needs no network |
| `report.md` | a comment on a pull request |
| `report.txt` | the same text as in the terminal |
| `junit.xml` | a build server: a case for each layer and site |
| `comparison_report.json`, `comparison_summary.json` | programs |
| `comparison.csv` | tables |

In JUnit, a site that was not compared is skipped. A last case holds the verdict, so that no build is green in which
nothing was proved: it fails with `fail`, and is an error with `incomparable`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from minimax_tools.errors import CannotRunError, install_command
from minimax_tools.machine.files import whole_file
from minimax_tools.printable import NEXT_TITLE, printable, printable_json, versioned
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus, Verdict
from reports.data import comparison_record, comparison_table, summary_record
from reports.markdown import render_markdown
from reports.page.evidence import Report
from reports.page.heat_map import FIGURES
from reports.page.html import has_library, render_page
from reports.terminal import render_comparison
from reports.views import headline, measured
from reports.wording import word_figure, word_layer

logger = logging.getLogger(__name__)

PAGE_NAME = "report.html"

_WIDTH = 120


def render_junit(comparison: Comparison) -> str:
    """Return a comparison as JUnit XML."""
    suite = ElementTree.Element("testsuite", name="mm2")
    for site in comparison.sites:
        _add_site(suite, site)
    for finding in comparison.findings:
        if not finding.is_of_sites and not finding.is_warning:
            case = _add_case(suite, word_layer(finding.layer), "finding: " + ", ".join(finding.sites))
            _add(case, "failure", finding.reason)
    for row in comparison.generated:
        case = _add_case(suite, "generated", f"prompt {row.row}")
        _add_status(case, row.status, row.reason)
    _add_verdict(suite, comparison)
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    suites = ElementTree.Element("testsuites", {**suite.attrib})
    suites.append(suite)
    ElementTree.indent(suites)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"
    )


def _add_site(suite: ElementTree.Element, site: SiteResult) -> None:
    case = _add_case(suite, word_layer(site.layer), site.site)
    _add_status(case, site.status, site.reason)
    figures = [(figure.title, measured(site, figure.name)) for figure in FIGURES]
    lines = [f"{title} {word_figure(value)}" for title, value in figures if value is not None]
    lines += [site.reason] if site.status is SiteStatus.WARN else []
    if lines:
        ElementTree.SubElement(case, "system-out").text = printable("\n".join(lines))


def _add_status(case: ElementTree.Element, status: SiteStatus, reason: str) -> None:
    if status is SiteStatus.FAIL:
        _add(case, "failure", reason)
    elif not status.is_compared:
        _add(case, "skipped", f"{status}: {reason}" if reason else str(status))


def _add_verdict(suite: ElementTree.Element, comparison: Comparison) -> None:
    case = _add_case(suite, "mm2", "verdict")
    reasons = "\n".join(
        f"{word_layer(blame.layer)}, {', '.join(blame.sites)}: {blame.reason}" for blame in comparison.blame
    )
    if comparison.verdict is Verdict.FAIL:
        _add(case, "failure", headline(comparison), text=reasons)
    elif comparison.verdict is Verdict.INCOMPARABLE:
        _add(case, "error", headline(comparison), text="\n".join(comparison.notes))


def _add_case(suite: ElementTree.Element, layer: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(
        suite, "testcase", classname=printable(f"mm2.{layer}"), name=printable(name), time="0"
    )


def _add(case: ElementTree.Element, tag: str, message: str, *, text: str = "") -> None:
    element = ElementTree.SubElement(case, tag, message=printable(message))
    if text:
        element.text = printable(text)


def write_report(report: Report, directory: Path) -> tuple[Path, ...]:
    """Write all files of a report into a directory, and return their paths.

    The page is written if the package that it needs is installed; if not, a warning says what to install.

    Raises:
        CannotRunError: The directory cannot be made or written to.
    """
    comparison, commands = report.comparison, report.next_commands
    texts = {
        "report.md": render_markdown(comparison, next_commands=commands, diagnosis=report.diagnosis),
        "report.txt": _terminal_text(report),
        "junit.xml": render_junit(comparison),
        "comparison_report.json": _json_text(
            versioned(comparison_record(comparison), next_commands=commands)
        ),
        "comparison_summary.json": _json_text(versioned(summary_record(comparison), next_commands=commands)),
        "comparison.csv": printable(comparison_table(comparison), keep="\r\n\t"),
    }
    if has_library():
        texts = {PAGE_NAME: render_page(report), **texts}
    paths = {directory / name: text for name, text in texts.items()}
    _write(paths)
    if PAGE_NAME not in texts:
        # A page of an earlier run would not fit the files beside it.
        (directory / PAGE_NAME).unlink(missing_ok=True)
        package = install_command("report")
        logger.warning("not written: %s, whose charts need a package: %s", PAGE_NAME, package)
    return tuple(paths)


def _terminal_text(report: Report) -> str:
    text = render_comparison(
        report.comparison, width=_WIDTH, is_terminal=False, shows_metrics=True, is_verbose=True
    )
    following = [NEXT_TITLE, *(f"  {printable(command)}" for command in report.next_commands)]
    parts = (text, report.diagnosis_text, "\n".join(following) if report.next_commands else "")
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _json_text(record: Mapping[str, Any]) -> str:
    return printable_json(record) + "\n"


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
        raise CannotRunError(
            f"cannot write the report {path}",
            found=error.strerror or str(error),
            next_step="Choose another directory for reports, one that can be written to.",
        ) from error
    if missing:
        raise CannotRunError(
            f"the report's {', '.join(missing)} in {path.parent} was removed while the others were written",
            next_step="Find out what else cleans up there, then run the same command again.",
        )

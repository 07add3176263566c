"""Junit: a comparison as JUnit XML, a case for each layer and site, for a build server to show.

| site | case |
|---|---|
| pass | passes |
| warn | passes, and says why |
| fail | a failure |
| not exposed, not captured, not judged | skipped |

A last case holds the verdict, so that no build is green that nothing was proved in: it fails with `fail`, and is an
error with `incomparable`.
"""

from __future__ import annotations

from xml.etree import ElementTree

from minimax_tools.printable import printable
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus, Verdict
from reports.page.heat_map import FIGURES, measured
from reports.wording import word_figure, word_layer


def render_junit(comparison: Comparison, *, sentence: str) -> str:
    """Return a comparison as JUnit XML; `sentence` is its verdict in words."""
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
    _add_verdict(suite, comparison, sentence)
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
        ElementTree.SubElement(case, "system-out").text = _xml("\n".join(lines))


def _add_status(case: ElementTree.Element, status: SiteStatus, reason: str) -> None:
    if status is SiteStatus.FAIL:
        _add(case, "failure", reason)
    elif not status.is_compared:
        _add(case, "skipped", f"{status}: {reason}" if reason else str(status))


def _add_verdict(suite: ElementTree.Element, comparison: Comparison, sentence: str) -> None:
    case = _add_case(suite, "mm2", "verdict")
    reasons = "\n".join(
        f"{word_layer(blame.layer)}, {', '.join(blame.sites)}: {blame.reason}" for blame in comparison.blame
    )
    if comparison.verdict is Verdict.FAIL:
        _add(case, "failure", sentence, text=reasons)
    elif comparison.verdict is Verdict.INCOMPARABLE:
        _add(case, "error", sentence, text="\n".join(comparison.notes))


def _add_case(suite: ElementTree.Element, layer: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(
        suite, "testcase", classname=_xml(f"mm2.{layer}"), name=_xml(name), time="0"
    )


def _add(case: ElementTree.Element, tag: str, message: str, *, text: str = "") -> None:
    element = ElementTree.SubElement(case, tag, message=_xml(message))
    if text:
        element.text = _xml(text)


def _xml(text: str) -> str:
    # What XML 1.0 cannot hold is of category C.
    return printable(text)

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from minimax_tools.results.results import Comparison, SiteStatus, Verdict
from reports.folder import render_junit


def read(comparison: Comparison, sentence: str = "FAIL: layer 5, moe_delta") -> ElementTree.Element:
    (suite,) = ElementTree.fromstring(render_junit(comparison, sentence=sentence))
    return suite


def case(suite: ElementTree.Element, layer: str, name: str) -> ElementTree.Element:
    (found,) = [
        one for one in suite.iter("testcase") if (one.get("classname"), one.get("name")) == (layer, name)
    ]
    return found


def test_every_layer_and_site_has_a_case(failing: Comparison) -> None:
    suite = read(failing)
    assert suite.get("tests") == str(failing.of + 1)
    assert suite.get("failures") == "3"
    assert case(suite, "mm2.layer 5", "moe_delta").find("failure") is not None
    assert case(suite, "mm2.layer 4", "moe_delta").find("failure") is None


def test_failure_says_why(failing: Comparison) -> None:
    failure = case(read(failing), "mm2.layer 5", "moe_delta").find("failure")
    assert failure is not None
    assert failure.get("message") == "rho 14.2 is above 1.6"
    figures = case(read(failing), "mm2.layer 5", "moe_delta").findtext("system-out") or ""
    assert "ρ 14.2" in figures


def test_sites_that_were_not_compared_are_skipped(unexposed: Comparison) -> None:
    suite = read(unexposed)
    skipped = case(suite, "mm2.layer 3", "q_rope").find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "not exposed"
    assert suite.get("skipped") == str(sum(not site.status.is_compared for site in unexposed.sites))


def test_warning_passes_and_says_why(warning: Comparison) -> None:
    found = case(read(warning), "mm2.layer 3", "moe_delta")
    assert found.find("failure") is None
    assert "near the limit" in (found.findtext("system-out") or "")


def test_pass_is_green(passing: Comparison) -> None:
    suite = read(passing, "PASS")
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "0", "0")


def test_incomparable_run_is_an_error_though_no_site_fails(passing: Comparison) -> None:
    hidden = tuple(replace(site, status=SiteStatus.NOT_JUDGED) for site in passing.sites)
    suite = read(
        replace(passing, verdict=Verdict.INCOMPARABLE, sites=hidden, notes=("no input",)), "INCOMPARABLE"
    )
    error = case(suite, "mm2.mm2", "verdict").find("error")
    assert error is not None
    assert (error.get("message"), error.text) == ("INCOMPARABLE", "no input")


def test_any_text_makes_valid_xml(failing: Comparison) -> None:
    hostile = "]]> <x y='\"'> & \x00\x1b[31m \ufffe \ud800 end"
    sites = tuple(
        replace(site, reason=hostile) if site.status is SiteStatus.FAIL else site for site in failing.sites
    )
    failure = case(read(replace(failing, sites=sites), hostile), "mm2.layer 5", "moe_delta").find("failure")
    assert failure is not None
    assert (failure.get("message") or "").startswith("]]> <x y='\"'> & \\x00\\x1b[31m \\ufffe \\ud800 end")

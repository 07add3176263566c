from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minimax_tools.errors import CannotRunError
from minimax_tools.printable import SCHEMA_VERSION
from minimax_tools.results.results import Comparison, SiteStatus, Verdict
from reports.data import comparison_record, comparison_table, summary_record
from reports.folder import render_junit, write_report
from reports.page.evidence import Report

NEXT = ("mm2-test weights --model m --target port.py:DecoderLayer --layer 2",)
NAMES = [
    "report.md",
    "report.txt",
    "junit.xml",
    "comparison_report.json",
    "comparison_summary.json",
    "comparison.csv",
]


@contextmanager
def removing(removed: Path, *, when: Path) -> Iterator[None]:
    """Removes a file at the moment when another one is renamed into place: Python announces each rename."""
    is_awaited = True

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal is_awaited
        if is_awaited and event == "os.rename" and str(arguments[1]) == str(when):
            is_awaited = False
            removed.unlink()

    sys.addaudithook(hear)  # it cannot be taken away again
    yield
    assert not is_awaited, f"{when} was not renamed"


@pytest.fixture
def pageless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the package that draws the page's charts."""
    monkeypatch.setitem(sys.modules, "vl_convert", None)


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Sets the size in bytes that no file may exceed, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def write(comparison: Comparison, folder: Path) -> tuple[Path, ...]:
    return write_report(Report(comparison=comparison, next_commands=NEXT), folder)


def test_page_comes_first_where_its_package_is_installed(failing: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed: it is in the extra report")
    written = write(failing, tmp_path)
    assert [path.name for path in written] == ["report.html", *NAMES]


@pytest.mark.usefixtures("pageless")
class TestWithoutThePage:
    def test_files_of_two_runs_never_mix(
        self, failing: Comparison, passing: Comparison, tmp_path: Path, largest_file: Callable[[int], None]
    ) -> None:
        written = write(passing, tmp_path)
        before = {path.name: path.read_bytes() for path in written}
        largest_file(min(map(len, before.values())))
        with pytest.raises(CannotRunError, match="cannot write the report"):
            write(failing, tmp_path)
        largest_file(resource.RLIM_INFINITY)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        write(failing, tmp_path)
        assert (tmp_path / "comparison_report.json").read_bytes() != before["comparison_report.json"]

    def test_all_other_files_are_written_and_say_what_to_install(
        self, failing: Comparison, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = tmp_path / "new" / "reports"
        assert [path.name for path in write(failing, folder)] == NAMES
        assert "not written: report.html" in caplog.text
        assert "pip install 'vl-convert-python>=1.9'" in caplog.text
        around = {"schema_version": SCHEMA_VERSION, "next": list(NEXT)}
        read = {name: (folder / name).read_text(encoding="utf-8") for name in NAMES}
        assert json.loads(read["comparison_report.json"]) == comparison_record(failing) | around
        assert json.loads(read["comparison_summary.json"]) == summary_record(failing) | around
        assert read["comparison.csv"] == comparison_table(failing)

    def test_report_replaces_an_earlier_one_and_its_page_and_leaves_nothing_else(
        self, failing: Comparison, passing: Comparison, tmp_path: Path
    ) -> None:
        (tmp_path / "report.html").write_text("another run", encoding="utf-8")
        write(failing, tmp_path)
        assert not (tmp_path / "report.html").exists()
        write(passing, tmp_path)
        report = json.loads((tmp_path / "comparison_report.json").read_text(encoding="utf-8"))
        assert report["verdict"] == "pass"
        assert len(list(tmp_path.iterdir())) == len(NAMES)

    def test_same_comparison_writes_the_same_bytes(self, warning: Comparison, tmp_path: Path) -> None:
        first = [path.read_bytes() for path in write(warning, tmp_path / "a")]
        second = [path.read_bytes() for path in write(warning, tmp_path / "b")]
        assert first == second

    def test_file_that_is_removed_meanwhile_is_named(self, passing: Comparison, tmp_path: Path) -> None:
        # The last file is renamed first.
        with (
            removing(tmp_path / NAMES[-1], when=tmp_path / NAMES[0]),
            pytest.raises(CannotRunError, match=rf"the report's {NAMES[-1]} .* was removed while"),
        ):
            write(passing, tmp_path)

    def test_directory_that_cannot_be_made_is_named(self, passing: Comparison, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way", encoding="utf-8")
        with pytest.raises(CannotRunError, match=r"cannot write the report .*file/reports") as caught:
            write(passing, tmp_path / "file" / "reports")
        assert caught.value.next_step is not None

    def test_file_that_cannot_be_replaced_is_named(self, passing: Comparison, tmp_path: Path) -> None:
        (tmp_path / "report.md" / "full").mkdir(parents=True)
        with pytest.raises(CannotRunError, match=r"report\.md"):
            write(passing, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def read_junit(comparison: Comparison) -> ElementTree.Element:
    (suite,) = ElementTree.fromstring(render_junit(comparison))
    return suite


def case_of(comparison: Comparison, layer: str, name: str) -> ElementTree.Element:
    (found,) = read_junit(comparison).findall(f"testcase[@classname='mm2.{layer}'][@name='{name}']")
    return found


@pytest.mark.parametrize(
    ("name", "failures", "skipped"), [("failing", 3, 0), ("passing", 0, 0), ("unexposed", 0, 20)]
)
def test_junit_has_a_case_for_each_layer_and_site_and_the_verdict(
    name: str, failures: int, skipped: int, request: pytest.FixtureRequest
) -> None:
    comparison = request.getfixturevalue(name)
    suite = read_junit(comparison)
    counts = [suite.get(name) for name in ("tests", "failures", "skipped", "errors")]
    assert counts == [str(comparison.of + 1), str(failures), str(skipped), "0"]


def test_junit_says_why_a_site_fails_or_warns(failing: Comparison, warning: Comparison) -> None:
    case = case_of(failing, "layer 5", "moe_delta")
    failure = case.find("failure")
    assert failure is not None
    assert failure.get("message") == "rho 14.2 is above 1.6"
    assert "ρ 14.2" in (case.findtext("system-out") or "")
    warned = case_of(warning, "layer 3", "moe_delta")
    assert warned.find("failure") is None
    assert "near the limit" in (warned.findtext("system-out") or "")


def test_incomparable_run_is_an_error_of_junit_though_no_site_fails(passing: Comparison) -> None:
    hidden = tuple(replace(site, status=SiteStatus.NOT_JUDGED) for site in passing.sites)
    changed = replace(passing, verdict=Verdict.INCOMPARABLE, sites=hidden, notes=("no input",))
    error = case_of(changed, "mm2", "verdict").find("error")
    assert error is not None
    assert (error.get("message"), error.text) == ("INCOMPARABLE", "no input")


def test_any_text_makes_valid_xml(failing: Comparison) -> None:
    hostile = "]]> <x y='\"'> & \x00\x1b[31m \ufffe \ud800 end"
    sites = tuple(
        replace(site, reason=hostile) if site.status is SiteStatus.FAIL else site for site in failing.sites
    )
    failure = case_of(replace(failing, sites=sites), "layer 5", "moe_delta").find("failure")
    assert failure is not None
    expected = "]]> <x y='\"'> & \\x00\\x1b[31m \\ufffe \\ud800 end"
    assert (failure.get("message") or "").startswith(expected)

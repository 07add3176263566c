"""Pages of made-up comparisons, and a headless Chromium that opens them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from minimax_tools.results.results import Comparison
from reports.page.evidence import (
    DiagnosedRun,
    ErrorHistogram,
    ErrorPicture,
    Evidence,
    FlipPoint,
    LayerRouting,
    LogitsEvidence,
    Report,
    SiteErrors,
    TokenChance,
    TopTokens,
    WorstElement,
)
from reports.page.html import render_page
from reports.page.origins import OriginRow

NEXT = ("mm2-test weights --model m --target port.py:DecoderLayer --layer 5", "mm2-diagnose --model m")


def site_errors() -> SiteErrors:
    return SiteErrors(
        layer=5,
        site="moe_delta",
        why="to blame",
        num_tokens=4,
        num_channels=8,
        has_twin=True,
        histogram=ErrorHistogram(
            edges=(1e-4, 1e-3, 1e-2), port=(1, 7), golden=(6, 2), num_equal=1, num_equal_golden=3
        ),
        picture=ErrorPicture(
            unit="the noise",
            token_starts=(0, 2, 4),
            token_names=("row 0, token 0 to 1", "row 0, token 2 to 3"),
            channel_starts=(0, 4, 8),
            blocks=((1.0, 2.0), (50.0, float("inf"))),
            by_token=(1.5, 60.0),
            by_channel=(30.0, 40.0),
            massive=(3,),
        ),
        worst=(
            WorstElement(
                row=0, position=3, place="239", golden=0.5, port=float("nan"), twin=0.51, error=float("nan")
            ),
        ),
    )


def evidence(text: str = " the") -> Evidence:
    chances = (TokenChance(token=17, text=text, probability=0.75),)
    return Evidence(
        sites=(site_errors(),),
        routing=(
            LayerRouting(
                layer=5,
                golden_load=(3, 1),
                port_load=(2, 2),
                reach=0.1,
                flips=(FlipPoint(row=0, position=1, margin=0.2, is_explained=False),),
            ),
        ),
        logits=LogitsEvidence(
            rows=(0, 0, 1),
            positions=(0, 1, 0),
            divergence=(0.0, 0.5, 1e-6),
            foreseen=(0.01, 0.01, 0.02),
            top=(TopTokens(row=0, position=1, divergence=0.5, golden=chances, port=chances),),
        ),
    )


@pytest.fixture(scope="session")
def plan(diagnose: Callable[..., DiagnosedRun]) -> Callable[..., Report]:
    """Makes a report; what is not given is made up."""

    def make(comparison: Comparison, **parts: Any) -> Report:
        origins = (
            OriginRow(name="backend", golden="cuda", port="neuron"),
            OriginRow(name="model_source", golden="m", port="m"),
        )
        made_up: dict[str, Any] = {
            "next_commands": NEXT,
            "evidence": evidence(),
            "diagnosis": diagnose(),
            "origins": origins,
        }
        return Report(comparison=comparison, **(made_up | parts))

    return make


@pytest.fixture
def make_evidence() -> Callable[[str], Evidence]:
    """Makes evidence with a text of the test's own."""
    return evidence


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A page in the browser, and what it wrote to the console."""

    page: Any
    console: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def chosen(self) -> str | None:
        """The place that the panel tells about; None while it is closed."""
        panel = self.page.locator("#details")
        return self.text("#details-place") if panel.is_visible() else None


# Of a module: while it is open, an event loop runs in this process, and later tests may need one of their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed: it is in the extra report")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: it is in the extra dev"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def show(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Opened]]:
    """Opens a page from disk, offline, and waits until its charts are drawn."""
    contexts = []

    def run(report: Report, *, width: int = 1280, **options: Any) -> Opened:
        path = tmp_path_factory.mktemp("page") / "report.html"
        path.write_text(render_page(report), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        context.set_offline(True)
        opened = Opened(page=context.new_page())
        opened.page.on("console", lambda message: opened.console.append(message.text))
        opened.page.on("pageerror", lambda error: opened.console.append(str(error)))
        opened.page.on("requestfailed", lambda request: opened.console.append(request.url))
        opened.page.goto(path.as_uri())
        opened.page.wait_for_selector("html[data-drawn=all]", timeout=60_000)
        return opened

    yield run
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def failing_page(show: Callable[..., Opened], plan: Callable[..., Report], failing: Comparison) -> Opened:
    """The page of the failing comparison, opened once."""
    return show(plan(failing))


@pytest.fixture
def opened(failing_page: Opened) -> Iterator[Opened]:
    """Page of the failing comparison, for one test; what this did to it is undone behind it."""
    yield failing_page
    page = failing_page.page
    page.emulate_media(media="screen", color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 900})
    page.select_option("#figure", index=0)
    page.keyboard.press("Escape")
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")

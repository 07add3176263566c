"""The page in a real browser: everything is there, can be reached, and nothing of a capture runs in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from minimax_tools.model.graph import ModelGraph
from minimax_tools.results.results import Comparison, SiteStatus
from reports.page.evidence import DiagnosedRun, Evidence, Report
from reports.page.html import SITE_MEANINGS, draw_charts
from reports.page.origins import OriginRow

HOSTILE = (
    "</script><script>window.hacked=1</script>\"'><img src=x onerror=window.hacked=1> {{7*7}} ${7*7} \u2028"
)
BLAMED = "#cell-5-moe_delta"

Show = Callable[..., Any]
Plan = Callable[..., Report]
Opened = Any  # as `show` returns it


class TestReading:
    def test_verdict_commands_and_the_blamed_site_are_there(
        self, opened: Opened, failing: Comparison
    ) -> None:
        assert opened.text("h1") == "FAIL: layer 5, moe_delta"
        assert "rho 14.2 is above 1.6" in opened.text("#verdict")
        assert opened.text(".commands code") == (
            "mm2-test weights --model m --target port.py:DecoderLayer --layer 5"
        )
        assert opened.page.locator(BLAMED).is_visible()
        assert opened.text(BLAMED) == "✕14.2"
        assert opened.page.locator(".cell").count() == failing.of
        assert opened.console == []

    def test_every_chart_is_drawn(self, opened: Opened, plan: Plan, failing: Comparison) -> None:
        report = plan(failing)
        num_charts = sum(map(len, draw_charts(report.comparison, report.evidence).values()))
        assert opened.page.locator("figure svg.marks").count() == num_charts
        assert num_charts >= 8

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["nonfinite", "chained", "passing", "warning", "unexposed"])
    def test_no_other_comparison_writes_to_the_console(
        self, show: Show, plan: Plan, name: str, request: pytest.FixtureRequest
    ) -> None:
        opened = show(plan(request.getfixturevalue(name)))
        assert opened.console == []
        assert opened.page.locator("figure svg.marks").count() >= 8
        if name == "unexposed":
            assert "Not exposed by the port: 16 sites" in opened.text("#uncompared")
            assert opened.text("#cell-3-q_rope") == "–"

    def test_sections_tell_what_the_evidence_holds(self, opened: Opened) -> None:
        assert "239" in opened.text("#errors-5-moe_delta tbody")
        assert "gate_up_swapped" in opened.text("#diagnosis tr.named")
        assert opened.text("#diagnosis tbody tr:nth-child(3)").startswith("3\tact_missing nearest\t88.0")
        assert opened.text("#logits .top h4") == "after row 0, token 1 KL 0.500 nats"
        assert opened.page.locator("#origins tr.differs").count() == 1
        assert opened.text("#origins tr.differs").startswith("≠\tbackend\tcuda\tneuron")
        assert opened.text("#uncompared p") == "Every site that the run declares was compared."

    def test_word_is_explained_on_hover_and_on_focus(self, opened: Opened) -> None:
        term = opened.page.locator("#map .term", has_text="noise floor").first
        assert not opened.page.locator("#tip").is_visible()
        for show_it in (term.focus, term.hover):
            show_it()
            assert opened.text("#tip").startswith("the error that BF16 alone costs the golden")
            opened.page.keyboard.press("Escape")
            opened.page.mouse.move(0, 0)
            assert not opened.page.locator("#tip").is_visible()

    @pytest.mark.parametrize("width", [1280, 400])
    def test_every_site_is_explained_where_it_stands(self, opened: Opened, width: int) -> None:
        opened.page.set_viewport_size({"width": width, "height": 900})
        heads = opened.page.locator("#map th.site").all()
        assert [head.inner_text() for head in heads] == [str(site) for site in ModelGraph().sites[1:]]
        for place in ("#map th.site >> nth=-1", ".blame .site-name", "#errors .site-name"):
            word = opened.page.locator(place).first
            word.scroll_into_view_if_needed()
            word.hover()
            assert opened.text("#tip") == f"{word.inner_text()}: {SITE_MEANINGS[word.inner_text()]}"
            box = opened.page.locator("#tip").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
        opened.page.click(BLAMED)
        assert opened.text("#details-meaning") == SITE_MEANINGS["moe_delta"]


class TestChoosing:
    def test_click_on_a_cell_shows_the_site(self, opened: Opened) -> None:
        assert opened.chosen() is None
        opened.page.click(BLAMED)
        assert opened.chosen() == "layer 5, moe_delta: fail"
        assert "ρ of the worst token" in opened.text("#details-facts")
        assert opened.page.get_attribute("#details-errors", "href") == "#errors-5-moe_delta"
        opened.page.click("#cell-0-q_proj")
        assert opened.chosen() == "layer 0, q_proj: pass"
        assert not opened.page.locator("#details-errors").is_visible()

    def test_keys_lead_to_any_cell(self, opened: Opened) -> None:
        # Tab leads to the blamed cell first.
        opened.page.focus("#figure")
        for _ in range(12):
            opened.page.keyboard.press("Tab")
            if opened.page.evaluate("document.activeElement.classList.contains('cell')"):
                break
        assert opened.page.evaluate("document.activeElement.id") == BLAMED[1:]
        opened.page.keyboard.press("Enter")
        assert opened.chosen() == "layer 5, moe_delta: fail"
        for key, place in (
            ("ArrowRight", "layer 5, output: fail"),
            ("ArrowUp", "layer 4, output: pass"),
            ("Home", "layer 4, input_norm: pass"),
            ("PageDown", "layer 7, input_norm: pass"),
            ("End", "layer 7, output: pass"),
        ):
            opened.page.keyboard.press(key)
            assert opened.chosen() == place
        opened.page.keyboard.press("Escape")
        assert opened.chosen() is None
        assert opened.page.evaluate("document.activeElement.id") == "cell-7-output"

    def test_another_figure_changes_every_cell(self, opened: Opened) -> None:
        titles = opened.page.locator("#figure option").all_inner_texts()
        assert len([title for title in titles if title.endswith("(classic)")]) == 5
        assert titles[:4] == ["ρ", "relative L2", "norm ratio", "cosine (classic)"]
        before = opened.page.locator(BLAMED).evaluate("node => getComputedStyle(node).backgroundColor")
        opened.page.select_option("#figure", label="cosine (classic)")
        assert opened.text(BLAMED) == "✕0.99730"
        assert "cosine 0.99730" in opened.page.get_attribute(BLAMED, "aria-label")
        after = opened.page.locator(BLAMED).evaluate("node => getComputedStyle(node).backgroundColor")
        assert before != after

    def test_blame_links_to_its_cell(self, opened: Opened) -> None:
        opened.page.click("a.to-cell")
        assert opened.chosen() == "layer 5, moe_delta: fail"

    def test_command_is_copied_or_selected(self, opened: Opened) -> None:
        opened.page.click("button.copy")
        opened.page.locator("button.copy", has_text=re.compile("Copied|Ctrl")).wait_for()
        button = opened.text("button.copy")
        selected = opened.page.evaluate("getSelection().toString()")
        assert button == "Copied" or selected.startswith("mm2-test weights --model m")


class TestDiagnosis:
    @pytest.mark.slow
    def test_without_a_name_the_place_comes_before_the_hints(
        self, show: Show, plan: Plan, undiagnosed: DiagnosedRun, failing: Comparison, failing_page: Opened
    ) -> None:
        opened = show(plan(failing, diagnosis=undiagnosed))
        text = opened.text("#diagnosis")
        assert text.split("\n\n")[:2] == ["Diagnosis", undiagnosed.headline]
        first, second = undiagnosed.places[0].lies
        assert text.index(first) < text.index(second) < text.index("What came nearest: hints, no causes")
        assert opened.page.locator("#diagnosis tr.named").count() == 0
        assert "hints" not in failing_page.text("#diagnosis")

    @pytest.mark.slow
    def test_figures_do_not_overlap_on_a_phone(
        self, show: Show, plan: Plan, diagnose: Callable[..., DiagnosedRun], failing: Comparison
    ) -> None:
        run = diagnose()
        (place,) = run.places
        wide = tuple(
            replace(mistake, leaves="0.956 … 1.123", explains="99.9 … 100.0") for mistake in place.mistakes
        )
        changed = replace(run, places=(replace(place, mistakes=wide),))
        opened = show(plan(failing, diagnosis=changed), width=360)
        for cell in opened.page.locator("#diagnosis td").all():
            assert cell.evaluate("node => node.scrollWidth <= node.clientWidth")


class TestAppearance:
    @pytest.mark.parametrize("width", [390, 1280])
    def test_no_width_makes_the_page_scroll_sideways(self, opened: Opened, width: int) -> None:
        opened.page.set_viewport_size({"width": width, "height": 900})
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        box = opened.page.locator(BLAMED).bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= width

    @pytest.mark.slow
    def test_dark_mode_is_dark_and_charts_follow(
        self, show: Show, plan: Plan, failing: Comparison, failing_page: Opened
    ) -> None:
        def colours(opened: Opened) -> tuple[int, str]:
            page = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
            label = opened.page.locator("figure svg text").first
            ink = label.evaluate("node => getComputedStyle(node).fill")
            return sum(map(int, page[4:-1].split(","))), ink

        light, dark_ink = colours(failing_page)
        dark, light_ink = colours(show(plan(failing), color_scheme="dark"))
        assert light > 600
        assert dark < 150
        assert dark_ink != light_ink

    def test_print_is_grey_and_failures_keep_their_mark(self, opened: Opened) -> None:
        opened.page.emulate_media(media="print", color_scheme="dark")
        for selector in (BLAMED, "h1", "body"):
            for name in ("color", "backgroundColor"):
                value = opened.page.locator(selector).first.evaluate(
                    f"node => {{ const c = document.createElement('canvas').getContext('2d');"
                    f" c.fillStyle = getComputedStyle(node).{name}; c.fillRect(0, 0, 1, 1);"
                    f" return [...c.getImageData(0, 0, 1, 1).data]; }}"
                )
                red, green, blue, _ = value
                assert max(red, green, blue) - min(red, green, blue) <= 1
        assert opened.text(BLAMED).startswith("✕")


class TestEscaping:
    def test_text_of_captures_is_text(
        self,
        show: Show,
        plan: Plan,
        failing: Comparison,
        make_evidence: Callable[[str], Evidence],
        diagnose: Callable[..., DiagnosedRun],
    ) -> None:
        (blame,) = failing.blame
        sites = tuple(
            replace(site, reason=HOSTILE, where=(HOSTILE,)) if site.status is SiteStatus.FAIL else site
            for site in failing.sites
        )
        # The name of a site too.
        sites = tuple(replace(site, site=HOSTILE) if site.site == "attn_delta" else site for site in sites)
        comparison = replace(
            failing,
            reference=HOSTILE,
            target=HOSTILE,
            notes=(HOSTILE,),
            tokens=HOSTILE,
            sites=sites,
            blame=(replace(blame, reason=HOSTILE),),
        )
        report = plan(
            comparison,
            next_commands=(HOSTILE,),
            evidence=make_evidence(HOSTILE),
            diagnosis=diagnose(HOSTILE),
            origins=(OriginRow(name=HOSTILE, golden=HOSTILE, port="b"),),
        )
        opened = show(report)
        opened.page.click(BLAMED)
        for selector in (
            *("#details-reason", "#verdict", "#uncompared", "#origins tbody", "#diagnosis"),
            *("#logits .top", ".commands", "#map"),
        ):
            assert "<img src=x onerror=window.hacked=1> {{7*7}} ${7*7}" in opened.text(selector), selector
        assert opened.page.evaluate("window.hacked") is None
        assert opened.page.locator("img").count() == 0
        assert opened.console == []

    @pytest.mark.slow
    def test_policy_lets_no_other_script_run(self, show: Show, plan: Plan, failing: Comparison) -> None:
        opened = show(plan(failing))
        opened.page.evaluate(
            "() => { const node = document.createElement('div');"
            " node.innerHTML = '<img src=x onerror=\"window.hacked=1\">';"
            " document.body.append(node); const script = document.createElement('script');"
            " script.textContent = 'window.hacked = 2'; document.body.append(script); }"
        )
        opened.page.wait_for_timeout(200)
        assert opened.page.evaluate("window.hacked") is None
        # The browser says what it refused: the policy is in force.
        assert any("Content Security Policy" in line for line in opened.console)

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from minimax_tools.results.results import (
    Blame,
    BlameGroup,
    Comparison,
    Curve,
    CurvePoint,
    SiteStatus,
    Verdict,
)
from reports.terminal import render_comparison

EXAMPLES = ("passing", "failing", "warning", "nonfinite", "unexposed", "classic", "chained")


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Comparison:
    comparison: Comparison = request.getfixturevalue(request.param)
    return comparison


def render(comparison: Comparison, *, width: int = 100, is_verbose: bool = True) -> str:
    return render_comparison(comparison, width=width, is_terminal=False, is_verbose=is_verbose)


def row_of(text: str, *words: str) -> list[str]:
    """The cells of the one line that begins with `words`."""
    rows = [cells for line in text.splitlines() if (cells := line.split())[: len(words)] == list(words)]
    assert len(rows) == 1, f"{words} begin {len(rows)} lines"
    return rows[0]


class TestHeadline:
    def test_failure_names_the_place_to_blame(self, failing: Comparison) -> None:
        assert render(failing).splitlines()[0] == "FAIL: layer 5, moe_delta"

    def test_several_places_are_counted(self, failing: Comparison) -> None:
        blame = (*failing.blame, Blame(layer=7, sites=("q_norm", "k_norm"), reason="rho 9 is above 1.6"))
        text = render(replace(failing, blame=blame))
        assert text.splitlines()[0] == "FAIL: layer 5, moe_delta (and 1 more place)"
        assert "  layer 7, q_norm, k_norm: rho 9 is above 1.6" in text

    def test_pass_stands_alone(self, passing: Comparison) -> None:
        assert render(passing).splitlines()[0] == "PASS"

    def test_warning_without_blame_names_where_it_first_shows(self, warning: Comparison) -> None:
        first = "layer 3, router_experts: 2 flips are within the noise [0.0013]"
        assert render(warning).splitlines()[0] == f"WARN: first at {first}"

    def test_chained_failure_blames_nobody_but_says_where_it_first_shows(self, chained: Comparison) -> None:
        text = render(chained)
        assert text.splitlines()[0] == "FAIL: first at layer 5, moe_delta"
        assert "To blame" not in text

    def test_model_outside_its_layers_can_be_to_blame(self, passing: Comparison) -> None:
        blame = (Blame(layer=None, sites=("logits",), reason="another head"),)
        text = render(replace(passing, verdict=Verdict.FAIL, blame=blame))
        assert text.splitlines()[0] == "FAIL: model, logits"

    def test_incomparable_says_so(self, passing: Comparison) -> None:
        text = render(replace(passing, verdict=Verdict.INCOMPARABLE, sites=(), notes=("no common layer",)))
        assert text.splitlines()[:2] == ["INCOMPARABLE", "compared 0 of 0 sites"]
        assert "no common layer" in text


class TestExtent:
    def test_all_compared(self, failing: Comparison) -> None:
        assert render(failing).splitlines()[1] == "compared 136 of 136 sites in 8 layers"

    def test_sites_outside_the_layers_count(self, passing: Comparison) -> None:
        assert render(passing).splitlines()[1] == "compared 139 of 139 sites in 8 layers and outside them"

    def test_what_is_missing_is_counted_and_listed_by_layers(self, unexposed: Comparison) -> None:
        text = render(unexposed)
        assert text.splitlines()[1] == "compared 116 of 136 sites in 8 layers"
        assert "Not exposed by the port: 16 sites\n  layers 0-7: q_rope, k_rope" in text
        assert (
            "Not captured by the golden: 4 sites\n  layers 0-3: router_logits (made with --sites layer)"
            in text
        )

    def test_nothing_missing_is_not_mentioned(self, passing: Comparison) -> None:
        assert "Not exposed" not in render(passing)
        assert "Not captured" not in render(passing)


class TestShortForm:
    """Verdict, blame and notes fit a screen; --verbose has the rest."""

    def test_failure_is_the_verdict_the_blame_and_what_follows_from_it(self, failing: Comparison) -> None:
        lines = render(failing, is_verbose=False).splitlines()
        assert lines[:2] == ["FAIL: layer 5, moe_delta", "compared 136 of 136 sites in 8 layers"]
        assert len(lines) <= 14
        assert "  Consequences, which fail behind it: output. --verbose shows their figures." in lines

    def test_pass_tells_the_largest_error(self, passing: Comparison) -> None:
        assert render(passing, is_verbose=False).splitlines()[2] == "largest ρ 1.11 (layer 7, router_weights)"

    def test_places_with_the_same_layers_stand_in_one_headline(self, failing: Comparison) -> None:
        blame = (
            Blame(layer=5, sites=("q_norm",), reason="ρ 9"),
            Blame(layer=5, sites=("k_norm",), reason="ρ 8"),
        )
        text = render(replace(failing, blame=blame), is_verbose=False)
        assert text.splitlines()[0] == "FAIL: layer 5, q_norm and k_norm"

    def test_classic_figures_are_shown_where_they_judge(self, classic: Comparison) -> None:
        assert "Pearson" in render(classic, is_verbose=False)

    def test_all_layers_of_a_long_chain_are_left_out(self, chained: Comparison) -> None:
        assert len(render(chained, is_verbose=False).splitlines()) <= 14


class TestOverview:
    def test_each_layer_has_one_line_with_its_largest_rho(self, passing: Comparison) -> None:
        text = render(passing)
        for layer in range(8):
            assert row_of(text, str(layer)) == [
                str(layer),
                "pass",
                "17/17",
                f"{1.04 + layer / 100:.2f}",
                "router_weights",
            ]
        assert row_of(text, "model")[:3] == ["model", "pass", "3/3"]

    def test_failing_layer_names_its_failing_sites(self, failing: Comparison) -> None:
        assert row_of(render(failing), "5", "FAIL")[3:] == [
            "14.2",
            "moe_delta",
            "moe_delta",
            "and",
            "1",
            "more",
        ]

    def test_nan_is_the_largest_rho(self, nonfinite: Comparison) -> None:
        assert row_of(render(nonfinite), "2", "FAIL")[3:5] == ["nan", "attn_context"]

    def test_without_a_noise_floor_the_lowest_cosine_stands_in(self, classic: Comparison) -> None:
        text = render(replace(classic, criteria="noise"))
        assert "lowest cosine" in text
        assert "largest ρ" not in text
        assert row_of(text, "5", "FAIL")[3:5] == ["0.997300", "moe_delta"]

    def test_classic_shows_the_five_figures_of_every_output(self, classic: Comparison) -> None:
        text = render(classic)
        assert "lowest cosine" not in text
        assert row_of(text, "5", "FAIL")[3:8] == ["0.0312", "0.00390", "96.88", "0.997300", "0.997300"]
        assert row_of(text, "2")[3:8] == ["0.00800", "0.00100", "99.20", "0.999991", "0.999991"]

    def test_five_figures_stand_beside_rho_where_they_are_asked_for(self, passing: Comparison) -> None:
        text = render_comparison(passing, width=120, is_terminal=False, shows_metrics=True)
        assert row_of(text, "2")[3:] == [
            *("0.00800", "0.00100", "99.20", "0.999991", "0.999991", "1.06", "router_weights")
        ]
        assert row_of(text, "model")[3:5] == ["0.00600", "7.50e-04"]
        assert "cosine" not in render(passing)

    def test_layer_without_an_output_has_no_figures(self, classic: Comparison) -> None:
        sites = tuple(site for site in classic.sites if site.site != "output")
        assert row_of(render(replace(classic, sites=sites)), "2")[3:8] == ["-"] * 5

    def test_layer_of_which_nothing_was_compared_has_no_verdict(self, unexposed: Comparison) -> None:
        hidden = next(site for site in unexposed.sites if site.site == "q_rope")
        text = render(replace(unexposed, sites=(hidden,)))
        assert row_of(text, "0")[:3] == ["0", "none", "0/1"]


class TestLayer:
    def test_failing_site_shows_its_figures(self, failing: Comparison) -> None:
        assert row_of(render(failing), "cause", "moe_delta") == [
            *("cause", "moe_delta", "14.2", "13.9", "19.9", "0.9688", "0.997300", "0.0312", "0,17,2044")
        ]

    def test_passing_sites_share_a_sentence(self, failing: Comparison) -> None:
        assert "15 other sites pass, largest ρ 1.09 (router_weights)." in render(failing)

    def test_classic_limits_that_miss_the_fault_are_quoted(self, failing: Comparison) -> None:
        text = render(failing)
        assert "The classic limits pass this layer's output: cosine 0.997300." in text
        assert "The classic limits fail moe_delta" not in text

    def test_classic_limits_are_not_quoted_where_they_judge_or_nothing_fails(
        self, classic: Comparison, warning: Comparison
    ) -> None:
        assert "The classic limits" not in render(classic)
        assert "The classic limits" not in render(warning)

    def test_reason_is_told_once_and_behind_it_figures_alone(self, failing: Comparison) -> None:
        text = " ".join(render(failing).split())
        assert text.count("rho 14.2 is above 1.6") == 1
        assert "output: rho 3.1 is above 1.6" not in text

    def test_blamed_site_says_where_it_is_worst(self, failing: Comparison) -> None:
        assert "moe_delta is worst at row 0, token 17: ρ 27.0" in render(failing)

    def test_site_without_figures_still_says_why_it_fails(self, nonfinite: Comparison) -> None:
        text = render(nonfinite)
        assert row_of(text, "behind", "attn_residual")[2:] == ["-"] * 7
        assert "attn_residual: shape [1, 96, 1536], expected [1, 96, 3072]" in text

    def test_nonfinite_elements_are_counted(self, nonfinite: Comparison) -> None:
        text = " ".join(render(nonfinite).split())
        assert "attn_context: 64 of 12288 elements are NaN or Inf in the port" in text
        assert "moe_delta: " not in text

    def test_flips_and_tokens_set_aside_are_counted(self, warning: Comparison) -> None:
        text = render(warning)
        assert "router_experts: 2 of 157 tokens have other experts, 2 of them within the noise" in text
        assert "2 tokens that have, or may have, other experts are left out of moe_delta." in text

    def test_estimated_rho_is_marked_and_explained(self, warning: Comparison, failing: Comparison) -> None:
        assert row_of(render(warning), "WARN", "moe_delta")[2] == "~1.50"
        assert "~: estimated" in render(warning)
        assert "~" not in render(failing)

    def test_of_many_bad_layers_the_first_are_drawn_and_the_rest_counted(self, chained: Comparison) -> None:
        text = render(chained)
        drawn = [line for line in text.splitlines() if re.fullmatch(r"Layer \d+", line)]
        assert drawn == ["Layer 5", "Layer 6", "Layer 7", "Layer 8"]
        assert "53 more layers with failures or warnings; --json has every site." in text

    def test_blamed_layers_are_drawn_before_others(self, chained: Comparison) -> None:
        blame = tuple(Blame(layer=layer, sites=("output",), reason="rho") for layer in (40, 50))
        text = render(replace(chained, blame=blame))
        drawn = [line for line in text.splitlines() if re.fullmatch(r"Layer \d+", line)]
        assert drawn == ["Layer 5", "Layer 6", "Layer 40", "Layer 50"]

    def test_many_blamed_layers_are_grouped(self, chained: Comparison) -> None:
        blame = tuple(Blame(layer=layer, sites=("q_norm",), reason=f"reason {layer}") for layer in range(62))
        group = BlameGroup(
            layers=tuple(range(62)), sites=("q_norm",), worst_layer=17, reason=blame[17].reason
        )
        text = render(replace(chained, blame=blame, blame_groups=(group,)))
        assert text.splitlines()[0] == "FAIL: layers 0-61, q_norm"
        assert "  layers 0-61, q_norm: worst in layer 17: reason 17" in text

    def test_sites_of_one_operation_share_a_block_and_a_number(self, failing: Comparison) -> None:
        sites = ("q_rope", "k_rope")
        changed = tuple(
            replace(site, status=SiteStatus.FAIL) if site.layer == 5 and site.site in sites else site
            for site in failing.sites
        )
        blame = tuple(Blame(layer=5, sites=(site,), reason=f"error of {site}") for site in sites)
        joined = tuple(replace(blamed, operation="rotary embedding") for blamed in blame)
        (moe,) = failing.blame
        cause = BlameGroup(
            layers=(5,), sites=sites, worst_layer=5, reason="both", operation="rotary embedding"
        )
        other = BlameGroup(layers=(5,), sites=moe.sites, worst_layer=5, reason=moe.reason)
        text = render(replace(failing, sites=changed, blame=(*joined, moe), blame_groups=(cause, other)))
        assert text.startswith("FAIL: layer 5, q_rope and k_rope and moe_delta\n")
        assert (
            "  layer 5, q_rope and k_rope: one cause, the rotary embedding\n"
            "    q_rope: error of q_rope\n"
            "    k_rope: error of k_rope\n"
        ) in text
        for number, site in ((1, "q_rope"), (1, "k_rope"), (2, "moe_delta")):
            assert row_of(text, "cause", str(number), site)
        # Without the shared operation each is a cause of its own.
        text = render(replace(failing, sites=changed, blame=(*blame, moe)))
        assert "one cause" not in text
        assert row_of(text, "cause", "3", "moe_delta")

    def test_many_groups_are_told_by_their_places(self, chained: Comparison) -> None:
        blame = tuple(
            Blame(layer=layer, sites=(f"site{layer}",), reason=f"why {layer}") for layer in range(9)
        )
        text = render(replace(chained, blame=blame))
        assert text.splitlines()[0] == "FAIL: layer 0, site0 (and 8 more places)"
        assert "why 5" in text
        assert "why 6" not in text
        assert "  layer 6: site6" in text


class TestCurve:
    @staticmethod
    def curve(num_layers: int, *, onset: int | None) -> Curve:
        points = tuple(
            CurvePoint(
                layer=layer, error=0.001 * (layer + 1), handed_on=0.001 * layer, floor=0.002, ratio=0.9
            )
            for layer in range(num_layers)
        )
        command = "" if onset is None else f"mm2-test single-layer --layer {onset}"
        return Curve(points=points, onset=onset, command=command)

    def test_onset_is_marked_and_told_what_to_run(self, chained: Comparison) -> None:
        text = render(replace(chained, curve=self.curve(62, onset=40)))
        assert "Errors beyond noise begin at layer 40." in text
        table = text[text.index("Error along the chain") :].splitlines()
        assert sum(line.endswith("onset") for line in table) == 1
        assert "46 more layers: --json has them all." in text

    def test_curve_without_an_onset_says_so(self, passing: Comparison) -> None:
        text = render(replace(passing, curve=self.curve(3, onset=None)))
        assert "No layer adds more than noise to its inherited error." in text
        assert "more layers" not in text

    def test_isolated_run_has_none(self, passing: Comparison) -> None:
        assert "Error along the chain" not in render(passing)


class TestLooks:
    def test_notes_come_last(self, failing: Comparison, passing: Comparison) -> None:
        assert render(failing).endswith(
            "Notes\n  - Run the part alone: mm2-test component --layer 5 --component moe"
        )
        assert "Notes" not in render(passing)

    def test_a_verdict_fits_a_narrow_terminal_aside_from_what_is_to_be_copied(
        self, example: Comparison
    ) -> None:
        lines = render(example, width=40, is_verbose=False).splitlines()
        if example.criteria == "classic":
            lines = lines[:2]  # the rest is a table of figures
        # A warning's first line holds its reason: reports and pytest quote that line alone.
        copied = ("WARN: ", "  golden ", "  run ", "  port ", "  tokens ")
        assert [line for line in lines if len(line) > 40 and not line.startswith(copied)] == []

    @pytest.mark.parametrize("width", [80, 100])
    def test_lines_fit_and_have_no_trailing_blanks(self, example: Comparison, width: int) -> None:
        lines = render(example, width=width).splitlines()
        assert max(len(line) for line in lines) <= width
        assert not any(line.endswith(" ") for line in lines)

    def test_narrow_terminal_cuts_no_figure(self, example: Comparison) -> None:
        assert "…" not in render(example, width=40)

    def test_paths_are_never_broken(self, passing: Comparison) -> None:
        path = "/home/ubuntu/" + "deep folder/" * 12
        assert f"  golden    {path}\n" in render(replace(passing, reference=path), width=80)

    def test_piped_text_has_no_escape_codes_and_a_terminal_gets_colour(
        self, failing: Comparison, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert "\x1b" not in render(failing)
        coloured = render_comparison(failing, width=100, is_terminal=True, is_verbose=True)
        assert coloured.startswith("\x1b[1;31mFAIL: layer 5, moe_delta")

    def test_colour_changes_no_word(self, example: Comparison) -> None:
        coloured = render_comparison(example, width=100, is_terminal=True, is_verbose=True)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
        assert [line.rstrip() for line in plain.splitlines()] == render(example).splitlines()

    def test_brackets_in_reasons_are_no_markup(self, failing: Comparison) -> None:
        blame = (Blame(layer=5, sites=("moe_delta",), reason="[bold]shape[/] [1, 2] :warning:"),)
        assert "[bold]shape[/] [1, 2] :warning:" in render(replace(failing, blame=blame))

    def test_piped_text_does_not_depend_on_the_terminal(
        self, example: Comparison, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "47")
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert render_comparison(example, is_terminal=False, is_verbose=True) == render(example, width=100)

    def test_same_comparison_gives_the_same_text(self, example: Comparison) -> None:
        assert render(example) == render(replace(example))

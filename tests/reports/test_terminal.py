"""A comparison as text: `texts/comparison.txt` holds the words, the tests here what the words must keep to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from minimax_tools.results.results import (
    Blame,
    BlameGroup,
    ChunkedRun,
    Comparison,
    Curve,
    GeneratedRow,
    LogitsResult,
    ModelFinding,
    PassLogits,
    SiteStatus,
    TokenChoice,
    Untested,
    Verdict,
)
from reports.terminal import render_comparison

EXAMPLES = ("passing", "failing", "warning", "nonfinite", "unexposed", "classic", "chained")
Expect = Callable[[str, Mapping[str, str]], None]


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Comparison:
    comparison: Comparison = request.getfixturevalue(request.param)
    return comparison


def render(comparison: Comparison, *, width: int = 100, is_verbose: bool = True) -> str:
    return render_comparison(comparison, width=width, is_terminal=False, is_verbose=is_verbose)


def whole_port(passing: Comparison) -> Comparison:
    """A failing run of a whole port: findings, passes, chunks, next tokens and generated ones."""
    rope = tuple(
        ModelFinding(
            number=0,
            layer=layer,
            sites=(site,),
            reason=f"error of {site}",
            is_of_sites=True,
            operation="rotary embedding",
            mistake="rope_theta" if layer == 2 else None,
            what="Another base.",
            look_at="rope_theta",
            parameters={"theta": 5},
        )
        for layer in (0, 1, 2)
        for site in ("q_rope", "k_rope")
    )
    cache = ModelFinding(number=2, layer=4, sites=("cache",), reason="other keys", in_chunks=True)
    logits = LogitsResult(
        num_tokens=10,
        kl_mean=0.5,
        kl_p95=0.75,
        kl_worst=2.0,
        worst_token=(0, 3),
        kl_mean_foreseen=0.01,
        kl_p95_foreseen=0.02,
        overlaps={1: 0.9, 5: 0.8},
        num_disagreeing=1,
        num_explained=0,
        worst_choices=(TokenChoice(row=0, position=3, reference=5, target=9, margin=0.5, reach=0.25),),
    )
    passes = tuple(
        PassLogits(number=number, num_tokens=5, kl_mean=0.1, kl_worst=0.5, worst_token=(0, 1), num_agreeing=4)
        for number in (0, 1)
    )
    row = GeneratedRow(row=0, num_compared=4, num_alike=4, status=SiteStatus.PASS, reason="")
    other: dict[str, Any] = {"row": 1, "num_alike": 1, "status": SiteStatus.FAIL, "reference": 7, "target": 8}
    generated = (row, replace(row, **other, reason="0.5 below"))
    sites = tuple(replace(site, logits=logits) if site.site == "logits" else site for site in passing.sites)
    return replace(
        passing,
        verdict=Verdict.FAIL,
        findings=(*rope, cache),
        sites=sites,
        pass_logits=passes,
        generated=generated,
        chunks=ChunkedRun(widths=(3, 5), compared=100, of=139),
    )


def test_words(
    request: pytest.FixtureRequest,
    passing: Comparison,
    failing: Comparison,
    chained: Comparison,
    expect_text: Expect,
) -> None:
    texts: dict[str, str] = {}
    for name in EXAMPLES:
        comparison = request.getfixturevalue(name)
        texts |= {name: render(comparison, is_verbose=False), f"{name}, verbose": render(comparison)}
    many = tuple(Blame(layer=layer, sites=(f"site{layer}",), reason=f"why {layer}") for layer in range(9))
    rope, rotary = ("q_rope", "k_rope"), "rotary embedding"
    groups = (
        BlameGroup(layers=(4, 5), sites=rope, worst_layer=5, reason="both", operation=rotary),
        BlameGroup(layers=(5,), sites=("moe_delta",), worst_layer=5, reason="ρ 14", where=("on token 3",)),
    )
    blame = [Blame(layer=5, sites=(site,), reason=f"error of {site}", operation=rotary) for site in rope]
    outside = Blame(layer=None, sites=("logits",), reason="another head")
    assert chained.curve is not None
    short = Curve(points=chained.curve.points[:3], onset=None, command="")
    untested = (
        Untested(what="decode", detail="decoding", by="mm2-test model"),
        Untested(what="ranks", detail="ranks"),
    )
    changed = {
        "curve without an onset": replace(passing, curve=short),
        "many causes": replace(chained, blame=many),
        "groups": replace(failing, blame=(*blame, *failing.blame), blame_groups=groups),
        "outside the layers": replace(passing, verdict=Verdict.FAIL, blame=(outside,)),
        "incomparable": replace(passing, verdict=Verdict.INCOMPARABLE, sites=(), notes=("no common layer",)),
        "untested": replace(passing, untested=untested, port="builtin", tokens="81 at positions 0-47"),
        "whole port": whole_port(passing),
    }
    texts |= {name: render(comparison, is_verbose=False) for name, comparison in changed.items()}
    texts["whole port, verbose"] = render(changed["whole port"])
    texts["metrics"] = render_comparison(passing, width=120, is_terminal=False, shows_metrics=True)
    expect_text("comparison.txt", texts)


def test_lines_fit_any_terminal_and_no_figure_is_cut(example: Comparison) -> None:
    for width in (80, 100):
        lines = render(example, width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert not any(line.endswith(" ") for line in lines)
    assert "…" not in render(example, width=40)
    verdict = render(example, width=40, is_verbose=False).splitlines()
    if example.criteria == "classic":
        verdict = verdict[:2]  # the rest is a table of figures
    # What is to be copied is whole. A warning's first line holds its reason: reports and pytest quote that line alone.
    copied = ("WARN: ", "  golden ", "  run ", "  port ", "  tokens ")
    assert [line for line in verdict if len(line) > 40 and not line.startswith(copied)] == []


def test_paths_are_never_broken(passing: Comparison) -> None:
    path = "/home/ubuntu/" + "deep folder/" * 12
    assert f" {path}\n" in render(replace(passing, reference=path), width=80)


def test_colour_and_the_terminal_change_no_word(example: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = render(example)
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = render_comparison(example, width=100, is_terminal=True, is_verbose=True)
    assert coloured.startswith("\x1b[1;3")
    words = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in words.splitlines()] == plain.splitlines()
    monkeypatch.setenv("COLUMNS", "47")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert render_comparison(example, is_terminal=False, is_verbose=True) == plain


def test_brackets_in_reasons_are_no_markup(failing: Comparison) -> None:
    blame = (Blame(layer=5, sites=("moe_delta",), reason="[bold]shape[/] [1, 2] :warning:"),)
    assert "[bold]shape[/] [1, 2] :warning:" in render(replace(failing, blame=blame))

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from minimax_tools.results.results import Comparison
from reports.markdown import render_markdown
from reports.page.evidence import DiagnosedRun

NEXT = ("mm2-diagnose --model m --gpu-path 'a b' --neuron-path run",)
HOSTILE = "](http://x) www.x.org <img src=x onerror=y> `code` | cell | **bold** @everyone ~~~ # title\n- item"


def render(comparison: Comparison, diagnosis: DiagnosedRun | None = None) -> str:
    return render_markdown(comparison, next_commands=NEXT, diagnosis=diagnosis)


def test_words(
    request: pytest.FixtureRequest,
    diagnose: Callable[..., DiagnosedRun],
    undiagnosed: DiagnosedRun,
    expect_text: Callable[[str, Mapping[str, str]], None],
) -> None:
    examples = {name: request.getfixturevalue(name) for name in ("failing", "passing", "unexposed")}
    texts = {name: render(comparison) for name, comparison in examples.items()}
    texts["named"] = render(examples["failing"], diagnose())
    texts["unnamed"] = render(examples["failing"], undiagnosed)
    expect_text("markdown.txt", texts)
    # What came nearest is a hint, which a comment leaves out as the terminal does.
    assert "norm_eps" not in texts["unnamed"]


@pytest.mark.parametrize("where", ["reason", "folder", "note", "mistake"])
def test_text_of_captures_means_nothing_in_markdown(
    failing: Comparison, diagnose: Callable[..., DiagnosedRun], where: str
) -> None:
    (blame,) = failing.blame
    hostile = {
        "reason": replace(failing, blame=(replace(blame, reason=HOSTILE),)),
        "folder": replace(failing, target=HOSTILE),
        "note": replace(failing, notes=(HOSTILE,)),
        "mistake": failing,
    }[where]
    text = render(hostile, diagnose(HOSTILE) if where == "mistake" else None)
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)
    assert "<img" not in outside
    assert "](" not in outside.replace("\\](", "")
    assert "://" not in outside.replace("\\://", "")
    assert "www." not in outside
    assert "@everyone" not in outside
    assert "\n- item" not in text
    golden, run = (line for line in text.splitlines() if line.startswith(("| golden |", "| run |")))
    assert len(re.findall(r"(?<!\\)\|", run)) == len(re.findall(r"(?<!\\)\|", golden)) == 3


@pytest.mark.parametrize("text", ["# title", "- item", "+ item", "> quote", "1. item", "* item"])
def test_text_begins_no_list_and_no_heading(failing: Comparison, text: str) -> None:
    (line,) = (line for line in render(replace(failing, notes=(text,))).splitlines() if text[-4:] in line)
    assert line.startswith(("- \\", "- 1\u200b"))

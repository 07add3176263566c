from __future__ import annotations

import re
from dataclasses import replace

import pytest

from minimax_tools.results.results import Comparison
from reports.markdown import render_markdown
from reports.page.diagnosed import DiagnosedPlace, DiagnosedRun, TriedMistake

NEXT = ("mm2-diagnose --model m --gpu-path 'a b' --neuron-path run",)
HOSTILE = "](http://x) www.x.org <img src=x onerror=y> `code` | cell | **bold** @everyone ~~~ # title\n- item"


def render(comparison: Comparison, diagnosis: DiagnosedRun | None = None) -> str:
    return render_markdown(
        comparison, sentence="FAIL: layer 5, moe_delta", next_commands=NEXT, diagnosis=diagnosis
    )


def named(name: str = "gate_up_swapped") -> DiagnosedRun:
    mistake = TriedMistake(
        name=name,
        parameters="",
        is_named=True,
        leaves=0.97,
        explains=0.99,
        what="Gate and up are exchanged.",
        look_at="the fused weight",
    )
    place = DiagnosedPlace(
        place="layer 5", unexplained=112.0, is_right=False, mistakes=(mistake,), num_hypotheses=111
    )
    return DiagnosedRun(places=(place,))


def test_verdict_comes_first_then_blame_and_commands(failing: Comparison) -> None:
    text = render(failing)
    assert text.startswith("## ❌ mm2: FAIL: layer 5, moe\\_delta\n")
    order = [text.index(words) for words in ("**To blame**", "**Next**", NEXT[0], "<details>", "| golden |")]
    assert order == sorted(order)
    assert "- layer 5, `moe_delta`: rho 14.2 is above 1.6" in text


def test_commands_stand_as_they_are_to_be_pasted(failing: Comparison) -> None:
    assert f"```bash\n{NEXT[0]}\n```" in render(failing)


def test_every_layer_has_a_row_with_its_worst_site(failing: Comparison) -> None:
    rows = re.findall(r"^\| \d+ \|.*$", render(failing), re.MULTILINE)
    assert len(rows) == 8
    assert rows[5] == "| 5 | **fail** | 17/17 | 14.2 | `moe_delta` | 0.997300 |"


def test_named_mistake_is_told_with_what_it_leaves(failing: Comparison) -> None:
    text = render(failing, named())
    assert "- layer 5: ρ 112" in text
    assert "  - matches `gate_up_swapped`, leaves ρ 0.970. Gate and up are exchanged." in text


def test_sites_that_were_not_compared_are_told(unexposed: Comparison) -> None:
    assert "Not exposed by the port: 16 sites" in render(unexposed)


def test_pass_blames_nobody(passing: Comparison) -> None:
    text = render_markdown(passing, sentence="PASS", next_commands=())
    assert text.startswith("## ✅ mm2: PASS")
    assert "To blame" not in text
    assert "Next" not in text


@pytest.mark.parametrize("where", ["reason", "folder", "note", "mistake"])
def test_text_of_captures_means_nothing_in_markdown(failing: Comparison, where: str) -> None:
    (blame,) = failing.blame
    hostile = {
        "reason": replace(failing, blame=(replace(blame, reason=HOSTILE),)),
        "folder": replace(failing, target=HOSTILE),
        "note": replace(failing, notes=(HOSTILE,)),
        "mistake": failing,
    }[where]
    text = render(hostile, named(HOSTILE) if where == "mistake" else None)
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

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from minimax_tools.results.results import Comparison
from reports.markdown import render_markdown
from reports.page.evidence import DiagnosedPlace, DiagnosedRun, TriedMistake

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
        leaves="0.970",
        explains="99",
        what="Gate and up are exchanged.",
        look_at="the fused weight",
    )
    place = DiagnosedPlace(
        place="layer 5",
        outcome=f"matches {name}: leaves ρ 0.970 of 112",
        is_right=False,
        mistakes=(mistake, replace(mistake, name="up_gate_halves", leaves="1.10", layers="in layer 5")),
    )
    return DiagnosedRun(headline=f"FAIL: layer 5, {name}", places=(place,), notes=("Mend the port first.",))


def unnamed() -> DiagnosedRun:
    near = TriedMistake(
        name="norm_eps",
        parameters="",
        is_named=False,
        leaves="377",
        explains="1",
        what="Another epsilon.",
        look_at="eps",
    )
    place = DiagnosedPlace(
        place="layers 0-1",
        outcome="no known mistake explains them (ρ 384 … 388)",
        is_right=False,
        lies=(
            "Lies between k_proj (right) and k_norm (wrong).",
            "4 more show the same pattern: layers 2-5.",
        ),
        mistakes=(near,),
    )
    return DiagnosedRun(headline="FAIL: layers 0-5, k_norm: no known mistake explains it", places=(place,))


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
    assert "**Diagnosis**: FAIL: layer 5, gate\\_up\\_swapped\n" in text
    assert "- layer 5: matches gate\\_up\\_swapped: leaves ρ 0.970 of 112\n" in text
    assert "  - Gate and up are exchanged. Look at the fused weight.\n" in text
    assert "  - Cannot be told from `up_gate_halves`, which leaves ρ 1.10 in layer 5.\n" in text
    assert "- Mend the port first.\n" in text


def test_without_a_name_the_place_and_the_layers_alike_are_told(failing: Comparison) -> None:
    text = render(failing, unnamed())
    told = text.partition("**Diagnosis**")[2].partition("**Next**")[0]
    assert "- layers 0-1: no known mistake explains them (ρ 384 … 388)\n" in told
    assert "  - Lies between k\\_proj (right) and k\\_norm (wrong).\n" in told
    assert "  - 4 more show the same pattern: layers 2-5.\n" in told
    # What came nearest is a hint, which a comment leaves out as the terminal does.
    assert "norm_eps" not in told


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

from __future__ import annotations

from dataclasses import replace

from minimax_tools.results.results import ModelFinding
from reports.canvas import Canvas
from reports.model_findings import draw_findings, word_first

ROPE = tuple(
    ModelFinding(
        number=0,
        layer=layer,
        sites=(site,),
        reason=f"error of {site}",
        is_of_sites=True,
        operation="rotary embedding",
    )
    for layer in (0, 1)
    for site in ("q_rope", "k_rope")
)


def draw(findings: tuple[ModelFinding, ...]) -> str:
    canvas = Canvas(width=100, is_terminal=False)
    draw_findings(canvas, findings)
    return canvas.text


def test_sites_of_one_operation_are_one_entry_over_their_layers() -> None:
    assert word_first(ROPE) == "prefill, layers 0-1, q_rope and k_rope"
    assert draw(ROPE).endswith(
        "  prefill, layers 0-1, q_rope and k_rope: one cause, the rotary embedding\n"
        "    q_rope: error of q_rope\n"
        "    k_rope: error of k_rope"
    )


def test_name_of_the_first_is_told_of_both() -> None:
    named = (replace(ROPE[0], mistake="rope_theta", what="Another base.", look_at="rope_theta"), *ROPE[1:])
    text = draw(named)
    assert "  prefill, layer 0, q_rope and k_rope: one cause" in text
    assert text.count("matches rope_theta") == 1
    assert "  prefill, layer 1, q_rope and k_rope: one cause" in text


def test_findings_without_a_shared_operation_are_apart() -> None:
    apart = tuple(replace(finding, operation="") for finding in ROPE)
    assert word_first(apart) == "prefill, layers 0-1, q_rope (and 1 more finding)"
    assert "one cause" not in draw(apart)

from __future__ import annotations

import re
from pathlib import Path

from minimax_tools.model.sites import ModelSite, Site
from reports.page.html import GLOSSARY, SITE_MEANINGS, explain_place, explain_sentence

REPOSITORY = Path(__file__).parents[3]


def test_template_explains_known_words_only() -> None:
    template = (REPOSITORY / "reports" / "page" / "assets" / "report.html.j2").read_text(encoding="utf-8")
    used = set(re.findall(r"term\('([^']+)'", template))
    assert len(used) > 5
    assert used <= set(GLOSSARY)


def test_every_site_is_explained_in_order_without_marks() -> None:
    assert tuple(SITE_MEANINGS) == (*map(str, Site), *map(str, ModelSite))
    assert SITE_MEANINGS["moe_delta"] == (
        "the weighted sum of the chosen experts' outputs, before it is added"
    )
    assert not any(mark in meaning for meaning in GLOSSARY.values() for mark in "*`")


def test_sites_are_explained_in_places_and_sentences() -> None:
    assert explain_place("layers 0-3, q_rope and output").count("<abbr") == 2
    tip = 'data-tip="k_norm: k_proj after its RMSNorm, one mean over all heads of a token"'
    assert tip in explain_sentence("Lies between k_proj (right) and k_norm (wrong).")


def test_plain_words_weights_and_captures_are_left_alone() -> None:
    """`output` may be a plain word in a sentence, and `q_norm.weight` is no site; markup of a capture is escaped."""
    for text in ("the rotary embedding of its input and output", "q_norm.weight", "my_q_norm", "q_normed"):
        assert explain_sentence(text) == text
    assert explain_place("<q_norm>").startswith("&lt;<abbr")
    assert "<img" not in explain_sentence("<img src=x> q_norm")

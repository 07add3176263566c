"""Ports on weights into which scales are folded: right if all that reads a scaled site undoes it, else placed there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PORTS = Path(__file__).parents[2] / "ports" / "folded.py"
LAYER = 1


@pytest.fixture
def judge(judge_layer: Any) -> Any:
    """Judges layer 1 of a port of `folded.py`."""
    return lambda name, *options: judge_layer(f"{PORTS}:{name}", *options)


@pytest.mark.parametrize(
    ("name", "scaled", "undone"),
    [
        ("SmoothedExperts", "post_norm", "router_logits and moe_delta"),
        ("SmoothedAttention", "input_norm", "q_proj, k_proj and v_proj"),
        ("FoldedValues", "v_proj, attn_context", "attn_delta"),
        ("QueryScale", "q_norm, q_rope", "attn_context"),
    ],
)
def test_scale_that_is_undone_everywhere_is_a_note(judge: Any, name: str, scaled: str, undone: str) -> None:
    exit_code, record = judge(name)
    assert (exit_code, record["verdict"], record["compared"]) == (0, "pass", 17)
    (note,) = (note for note in record["notes"] if "factor" in note)
    assert note == f"layer {LAYER}, {scaled}: each channel is off by a factor, which is undone in {undone}"


def test_queries_may_be_scaled_against_keys(judge: Any) -> None:
    exit_code, record = judge("QueriesAgainstKeys")
    assert (exit_code, record["verdict"]) == (0, "pass")


@pytest.mark.parametrize(
    ("name", "site", "words"),
    [
        ("GateLeft", "router_logits", "the scale of post_norm is undone in moe_delta, and not here"),
        ("ExpertsLeft", "moe_delta", "the scale of post_norm is undone in router_logits, and not here"),
        ("ValuesLeft", "v_proj", "the scale of input_norm is undone in q_proj and k_proj, and not here"),
        # Nothing undoes these: the site itself is wrong.
        ("NormAlone", "post_norm", "attn_residual is right"),
        ("ValuesScaled", "v_proj", "input_norm is right"),
        ("QueriesAlone", "q_norm", "q_proj is right"),
    ],
)
def test_scale_that_is_not_undone_everywhere_is_placed(judge: Any, name: str, site: str, words: str) -> None:
    exit_code, record = judge(name)
    assert (exit_code, [blame["sites"] for blame in record["blame"]]) == (1, [[site]])
    assert words in record["blame"][0]["reason"]


def test_factors_are_told_where_the_site_itself_is_wrong(judge: Any) -> None:
    _, record = judge("NormAlone")
    (group,) = record["blame_groups"]
    (sentence,) = group["where"]
    assert sentence.startswith("each channel is a multiple of the golden's, 0.25")

"""Ports whose submodules run several times in a forward: their parts are joined, or the site is not exposed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neuron.cli import main as mm2_test

PORTS = Path(__file__).parents[2] / "ports" / "in_parts.py"
LAYER = 1
OF_ATTENTION = ["q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_rope", "k_rope", "attn_context"]


@pytest.fixture
def judge(judge_layer: Any) -> Any:
    """Judges layer 1 of a port of `in_parts.py`, or of a traced file."""
    return lambda name, *options: judge_layer(
        name if name.startswith("traced:") else f"{PORTS}:{name}", *options
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ExpertsByTokens", ()),
        ("ExpertsByTokens", ("--compile", "eager")),
        ("ExpertsByColumns", ()),
        ("RowByRow", ()),
        ("Recomputed", ()),
    ],
)
def test_parts_that_add_up_are_joined(judge: Any, name: str, options: tuple[str, ...]) -> None:
    exit_code, record = judge(name, *options)
    assert (exit_code, record["verdict"], record["compared"], record["of"]) == (0, "pass", 17, 17)


def test_wrong_part_fails_where_it_is(judge: Any) -> None:
    exit_code, record = judge("OneChunkWrong")
    assert (exit_code, [blame["sites"] for blame in record["blame"]]) == (1, [["moe_delta"]])


@pytest.mark.parametrize(
    ("name", "hidden", "count"), [("WithoutPadding", OF_ATTENTION, 2), ("ExpertByExpert", ["moe_delta"], 8)]
)
def test_parts_that_cannot_be_joined_are_not_exposed_and_counted(
    judge: Any, name: str, hidden: list[str], count: int
) -> None:
    exit_code, record = judge(name)
    assert (exit_code, record["verdict"]) == (0, "pass")
    reasons = {site["site"]: site["reason"] for site in record["sites"] if site["status"] == "not exposed"}
    words = f"computed {count} times in a forward, in parts that cannot be joined to the batch"
    assert reasons == dict.fromkeys(hidden, words)


def test_traced_port_shows_its_parts(
    command: Any, judge: Any, small_fp8: Path, small_golden: Path, tmp_path: Path
) -> None:
    file = tmp_path / "traced.pt2"
    paths = ("--model", small_fp8, "--layer", LAYER, "--golden", small_golden, "--output", file)
    traced = command(mm2_test, "trace", *paths, "--backend", "cpu", "--target", f"{PORTS}:Recomputed")
    assert traced.exit_code == 0, traced.output
    exit_code, record = judge(f"traced:{file}")
    assert (exit_code, record["compared"], record["of"]) == (0, 17, 17)

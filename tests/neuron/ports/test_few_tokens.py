"""Ports that are wrong in a few tokens, which are listed, or everywhere by different amounts, which is no place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PORTS = Path(__file__).parents[2] / "ports" / "few_tokens.py"


@pytest.fixture
def sweep(run: Any, toy: Path, golden: Path) -> Any:
    """Runs all layers of a port on the toy's golden; the JSON."""

    def run_port(name: str) -> dict[str, Any]:
        sides = ("--model", toy, "--golden", golden, "--backend", "cpu", "--target", f"{PORTS}:{name}")
        record: dict[str, Any] = json.loads(run("sweep", *sides, "--json", "--quiet").stdout)
        return record

    return run_port


def test_tokens_that_see_the_next_are_listed_and_attention_is_blamed(sweep: Any) -> None:
    record = sweep("SeesNext")
    (group,) = record["blame_groups"]
    assert group["sites"] == ["attn_context"]
    told = [site["wrong_tokens"] for site in record["sites"] if site["site"] == "attn_context"]
    assert all(token % 8 == 7 for places in told for _, token in places)
    assert any("plus a multiple of 8" in words or "every 8th" in words for words in group["where"])
    assert not any("channels" in words for words in group["where"])


def test_error_of_all_experts_has_no_place(sweep: Any) -> None:
    record = sweep("UpByExpert")
    (group,) = record["blame_groups"]
    assert group["sites"] == ["moe_delta"]
    (sentence,) = group["where"]
    assert sentence.startswith("no token is near the floor: the best has ρ ")
    assert group["regions"] == []

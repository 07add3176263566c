"""The table of families: a cell says why a command does not work, and a page lists reasons once."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minimax_tools.cli import mm2_split
from minimax_tools.model.families import FAMILIES

SCRIPT = Path(__file__).parents[2] / "scripts" / "families.py"


@pytest.fixture
def script(load_module: Any) -> ModuleType:
    module: ModuleType = load_module(SCRIPT)
    return module


def test_a_cell_is_a_yes_or_the_commands_own_error(script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def plan_too_little(trial: Any) -> None:
        """Plan a node that is too small."""
        trial.run(mm2_split, "plan", "--model", trial.model, "--node", "a:memory=1MB")

    columns = {"memory": script.measure_memory, "plan": plan_too_little}
    monkeypatch.setattr(script, "COLUMNS", columns)
    trial = script.Trial(family=FAMILIES["olmoe"], folder=tmp_path)
    ends = dict(script.try_columns(trial, tuple(columns)))
    assert ends["memory"] is None
    assert "cannot hold the model" in ends["plan"]
    table = script.Table(columns=tuple(columns))
    for title in ("OLMoE", "Another"):
        table.reasons.update({(title, column): reason for column, reason in ends.items()})
    page = table.as_page()
    assert "| | memory | plan |" in page
    assert "| OLMoE | yes | no (1) |" in page
    assert "| Another | yes | no (1) |" in page
    assert page.count("cannot hold the model") == 1
    assert "| plan | Plan a node that is too small. |" in page


def test_a_column_brings_those_that_it_needs(script: Any) -> None:
    assert script.with_needed(["diagnose"]) == ("golden", "sweep", "diagnose")
    assert set(script.with_needed(list(script.COLUMNS))) == set(script.COLUMNS)

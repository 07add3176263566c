from __future__ import annotations

import pytest

from minimax_tools.results.results import Verdict


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL, Verdict.INCOMPARABLE])
def test_verdict_is_told_from_its_exit_code(verdict: Verdict) -> None:
    assert Verdict.of_exit_code(verdict.exit_code) is verdict


def test_command_that_was_used_wrongly_compared_nothing() -> None:
    assert Verdict.of_exit_code(2) is Verdict.INCOMPARABLE

"""Damaged captures are refused, by name, and never judged: through the commands, from end to end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from damage.captures import STATES, WholeCaptures, make_captures
from damage.damages import DAMAGES, Damage
from damage.tampering import exchange_files, sign

from minimax_tools.capture.manifest import Manifest

# Digests of their own hide nothing of a certified golden: its certificate is void, whatever was done.
SIGNED = "under digests"


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> WholeCaptures:
    return make_captures(tmp_path_factory.mktemp("damage"))


@pytest.mark.parametrize("state", STATES)
def test_whole_captures_are_judged(captures: WholeCaptures, state: str, tmp_path: Path) -> None:
    outcome = captures.judge(state, None, tmp_path / "scratch")
    text = " ".join(outcome.text.split())
    assert (outcome.exit_code, "PASS" in text) == (0, True)
    assert ("not certified" in text) == (state != "certified")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_damage_is_refused_by_name_and_is_nobodys_fault(
    captures: WholeCaptures, damage: Damage, tmp_path: Path
) -> None:
    outcome = captures.judge("plain", damage, tmp_path / "scratch")
    refused(outcome.exit_code, outcome.text, damage)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage, id=damage.name, marks=() if number % 6 == 0 else pytest.mark.slow)
        for number, damage in enumerate(DAMAGES)
    ],
)
def test_damage_of_a_certified_golden_is_refused(
    captures: WholeCaptures, damage: Damage, tmp_path: Path
) -> None:
    outcome = captures.judge("certified", damage, tmp_path / "scratch")
    refused(outcome.exit_code, outcome.text, damage)
    if damage.is_of_golden:
        told = "its certificate speaks of other tensors" in " ".join(outcome.text.split())
        assert told == (SIGNED in damage.name)


def refused(exit_code: int, text: str, damage: Damage) -> None:
    text = " ".join(text.split())
    assert exit_code == 3, text
    assert "PASS" not in text
    assert "To blame" not in text
    assert ("golden" if damage.is_of_golden else "run") in text
    assert [word for word in damage.named if word not in text] == []
    assert "again" in text


class TestShow:
    def test_whole_golden_is_verified(self, captures: WholeCaptures) -> None:
        outcome = captures.show(captures.golden("certified"))
        assert outcome.exit_code == 0
        assert "14 of 14 checks passed" in outcome.text
        num_stored = len(Manifest.read(captures.golden("certified")).entries)
        line = next(line for line in outcome.text.splitlines() if "tensors match" in line)
        assert int(line.split()[1]) > 2 * num_stored

    @pytest.mark.parametrize("is_signed", [False, True])
    def test_damage_voids_the_certificate(
        self, captures: WholeCaptures, tmp_path: Path, *, is_signed: bool
    ) -> None:
        captures.judge("certified", None, tmp_path / "scratch")
        golden = tmp_path / "scratch" / "golden"
        exchange_files(golden, "layer_0.fp32.safetensors", "layer_1.fp32.safetensors")
        if is_signed:
            sign(golden)
        outcome = captures.show(golden)
        assert outcome.exit_code == 3
        assert "VOID" in outcome.text
        assert "14 of 14 checks passed;" not in outcome.text
        assert ("DAMAGED" in outcome.text) != is_signed

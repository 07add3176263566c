"""A proof in words: what was undone, what is right then, and the lines that undo it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from compare.diagnosis.proof.proof import (
    MEND_FIRST,
    PROVE_THE_PLACE,
    MistakeProof,
    ProofOutcome,
    ProofWay,
    SiteProof,
    StageProof,
    draw_proofs,
    proved_edits,
    render_proof,
    word_outcomes,
    word_proof,
    word_proofs,
)
from reports.canvas import Canvas

PROVED, NOT_PROVED, NOT_PROVABLE = ProofOutcome.PROVED, ProofOutcome.NOT_PROVED, ProofOutcome.NOT_PROVABLE
SITES = (
    SiteProof(site="k_norm", before=200.0, after=None, is_right=True, is_replaced=True),
    SiteProof(site="attn_delta", before=90.0, after=1.0, is_right=True),
    SiteProof(site="router_experts", before=None, after=None, is_right=True),
    SiteProof(site="output", before=30.0, after=1.1, is_right=True),
)
FIGURES = "(attn_delta ρ 90.0 → 1.00; output ρ 30.0 → 1.10)"
LINES = ("tensors['w'] *= 2",)


def proof(outcome: ProofOutcome = PROVED, **parts: Any) -> MistakeProof:
    return MistakeProof(outcome=outcome, **parts)


@dataclass
class Finding:
    layer: int | None
    proof: MistakeProof | None


@pytest.mark.parametrize(
    ("found", "sentences"),
    [
        (
            proof(NOT_PROVABLE, reason="there is no port", next_step="Run one."),
            ["Not provable here: there is no port. Run one."],
        ),
        (proof(NOT_PROVABLE, reason="there is no port"), ["Not provable here: there is no port."]),
        (
            proof(NOT_PROVED, reason="it is wrong", stage=StageProof(leaves=1.0, unexplained=50.0)),
            ["Not proved: it is wrong; the mistake leaves ρ 1.00 of 50.0 of what the stage gave."],
        ),
        (
            proof(way=ProofWay.WEIGHTS, sites=SITES),
            [
                f"Proved: with the weights changed before the port converts them, the port's layer is right {FIGURES}."
            ],
        ),
        (
            proof(way=ProofWay.STAGE, sites=SITES, stage=StageProof(leaves=1.0, unexplained=50.0)),
            [
                f"Proved: with the right values at k_norm, the port's layer is right {FIGURES}; the mistake leaves ρ "
                "1.00 of 50.0 of what the stage gave."
            ],
        ),
        (
            proof(way=ProofWay.RECOMPUTED),
            ["Proved: recomputed from the run's own values, all else is right."],
        ),
        (
            proof(
                NOT_PROVED,
                way=ProofWay.WEIGHTS_AND_STAGE,
                reason="output fails",
                sites=SITES,
                remaining=("norm_eps", "other"),
            ),
            [
                f"Not proved: with the weights changed, and the right values at k_norm, output fails {FIGURES}.",
                "What is left matches norm_eps.",
            ],
        ),
        (
            proof(NOT_PROVED, way=ProofWay.WEIGHTS, reason="output fails", sites=SITES[3:]),
            [
                "Not proved: with the weights changed before the port converts them, output fails (output ρ 30.0 → "
                "1.10)."
            ],
        ),
    ],
)
def test_proof_is_told_in_sentences(found: MistakeProof, sentences: list[str]) -> None:
    assert list(word_proof(found)) == sentences


def test_worst_site_is_one_that_was_not_replaced() -> None:
    worst = proof(sites=SITES).worst
    assert worst is not None
    assert worst.site == "attn_delta"
    assert proof(sites=SITES[:1]).worst is None


def test_layers_of_one_outcome_are_told_together() -> None:
    wrong = proof(NOT_PROVABLE, reason="no port")
    findings = [
        Finding(1, proof(way=ProofWay.WEIGHTS)),
        Finding(2, wrong),
        Finding(3, wrong),
        Finding(4, None),
    ]
    assert word_proofs(findings)[1:] == ("Layers 2-3: Not provable here: no port.",)
    assert word_proofs(findings)[0].startswith("Layer 1: Proved: ")
    assert word_proofs(findings[1:2]) == ("Not provable here: no port.",)
    assert word_proofs(findings[3:]) == ()
    assert word_outcomes(findings) == f" ({PROVED}, {NOT_PROVABLE})"
    assert word_outcomes(findings[3:]) == ""


def edited(layer: int, number: int, outcome: ProofOutcome = PROVED, **parts: Any) -> Finding:
    return Finding(layer, proof(outcome, edit=(f"tensors['w'] *= {number}",), num_layers=9, **parts))


def test_lines_of_several_layers_stand_once() -> None:
    findings = [
        edited(1, 2),
        edited(3, 2),
        edited(4, 5, has_conversion=False),
        edited(5, 7, NOT_PROVED),
        Finding(None, proof(edit=LINES)),
        Finding(6, proof()),
    ]
    first, second = proved_edits(findings)
    assert first.lines[0] == "if layer_idx in (1, 3):"
    assert (first.has_conversion, second.has_conversion) == (True, False)


def drawn(findings: list[Finding]) -> str:
    canvas = Canvas(width=300, is_terminal=False)
    draw_proofs(canvas, findings)
    return canvas.text


def test_three_edits_are_drawn() -> None:
    four = [edited(layer, layer + 1) for layer in range(4)]
    assert drawn(four[:3]).count(PROVE_THE_PLACE) == 3
    assert "see --json" not in drawn(four[:3])
    assert drawn(four).count(PROVE_THE_PLACE) == 3
    assert "1 more, with other numbers: see --json." in drawn(four)
    assert "Lines that undo it, at the beginning of convert_state_dict:" in drawn(four)
    assert "in the port's class:" in drawn([edited(1, 2, has_conversion=False)])
    assert "Lines" not in drawn([Finding(1, proof(way=ProofWay.WEIGHTS))])


def test_rendered_proof_shows_lines_that_were_proved() -> None:
    text = render_proof(proof(lines=LINES, way=ProofWay.WEIGHTS), layer=3, undone="norm_eps")
    assert text.startswith("Layer 3 without norm_eps: proved\n")
    assert f"\n      {LINES[0]}\n" in text
    assert MEND_FIRST in text
    assert MEND_FIRST not in render_proof(proof(NOT_PROVED, lines=LINES), layer=3, undone="norm_eps")

"""The report of a diagnosis, as text and as JSON values, and that of a proof."""

from __future__ import annotations

from typing import Any

import pytest

from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, SiteDiagnosis
from compare.diagnosis.proof import MEND_FIRST, PROVE_THE_PLACE, MistakeProof, ProofOutcome, ProofWay
from compare.diagnosis.report import (
    diagnosis_record,
    render_diagnosis,
    render_nothing_to_prove,
    render_proof,
)
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Blame

NOTHING = "Nothing to prove: no mistake was named."


def finding(mistake: str, **parts: Any) -> MistakeFinding:
    return MistakeFinding(
        **{
            "layer": 1,
            "mistake": mistake,
            "parameters": {"eps": 0.5},
            "explains": 0.9,
            "leaves": 1.1,
            "amplitude": 1.0,
            "z": 9.0,
            "what": "It does.",
            "look_at": "it",
            **parts,
        }
    )


def layer(number: int, *blame: Blame, **parts: Any) -> LayerDiagnosis:
    return LayerDiagnosis(layer=number, sites=(Site.OUTPUT,), unexplained=90.0, blame=blame, **parts)


def diagnosis(*layers: LayerDiagnosis, **parts: Any) -> Diagnosis:
    return Diagnosis(reference="golden", target="run", is_failed=True, layers=layers, **parts)


def told(found: Diagnosis, **options: Any) -> str:
    return render_diagnosis(found, width=300, is_terminal=False, **options)


def test_text_tells_the_mistake_what_is_like_it_and_the_lines_that_undo_it() -> None:
    proof = MistakeProof(
        outcome=ProofOutcome.PROVED, way=ProofWay.WEIGHTS, edit=("tensors['w'] *= 2",), num_layers=1
    )
    named = finding("norm_eps", sources=("vllm#1", "vllm#2"), proof=proof)
    others = tuple(finding(f"mistake_{number}") for number in range(5))
    found = diagnosis(
        layer(1, named=(named, *others), num_hypotheses=7, notes=("of it",)), notes=("on the whole",)
    )
    lines = [line.strip() for line in told(found).splitlines() if line.strip()]
    assert lines == [
        "FAIL: layer 1, norm_eps (eps 0.5)",
        "golden  golden",
        "run     run",
        "Layer 1 matches norm_eps (eps 0.5): leaves ρ 1.10 of 90.0",
        "It does.",
        "Look at it.",
        "Explains 90 % of the error; amplitude 1.000, 9.00 times its uncertainty.",
        "Seen in vllm#1, vllm#2.",
        "Proved: with the weights changed before the port converts them, the port's layer is right.",
        "Lines that undo it, at the beginning of convert_state_dict:",
        "tensors['w'] *= 2",
        PROVE_THE_PLACE,
        "Cannot be told from: mistake_0 (eps 0.5), which leaves ρ 1.10; mistake_1 (eps 0.5), which leaves ρ 1.10; "
        "mistake_2 (eps 0.5), which leaves ρ 1.10; 2 more.",
        "7 hypotheses tried, judged by output",
        "- of it",
        "- on the whole",
        MEND_FIRST,
    ]


def test_text_tells_the_outcomes_of_a_mistake_that_is_like_the_first() -> None:
    proofs = [MistakeProof(outcome=outcome) for outcome in (ProofOutcome.NOT_PROVED, ProofOutcome.PROVED)]
    layers = [
        layer(
            number,
            named=(
                finding("first", layer=number, proof=proofs[0]),
                finding("second", layer=number, proof=proof),
            ),
        )
        for number, proof in enumerate(proofs)
    ]
    text = told(diagnosis(*layers))
    assert "Cannot be told from: second (eps 0.5), which leaves ρ 1.10 (not proved, proved)." in text


@pytest.mark.parametrize("num_layers", [3, 4])
def test_text_tells_three_edits_and_where_the_others_are(num_layers: int) -> None:
    def proved(number: int) -> MistakeProof:
        edit = (f"tensors['w'] *= {number + 2}",)
        return MistakeProof(outcome=ProofOutcome.PROVED, way=ProofWay.WEIGHTS, edit=edit, num_layers=9)

    layers = [
        layer(number, named=(finding("norm_eps", layer=number, proof=proved(number)),))
        for number in range(num_layers)
    ]
    text = told(diagnosis(*layers))
    assert text.count(PROVE_THE_PLACE) == 3
    assert ("1 more, with other numbers: see --json." in text) == (num_layers == 4)


def test_nothing_to_prove_is_said_where_proofs_were_asked_for() -> None:
    assert NOTHING in told(diagnosis(), proves=True)
    assert NOTHING not in told(diagnosis())
    assert NOTHING not in told(diagnosis(layer(1, named=(finding("norm_eps"),))), proves=True)


def test_answer_without_a_name_tells_places_and_notes_once() -> None:
    blame = [
        Blame(layer=number, sites=("k_norm",), reason="error", right=("k_proj",)) for number in (1, 2, 3)
    ]
    shapes = layer(3, blame[2], is_of_shape=True, notes=("k_norm is [1,2]", "k_norm is [1,2]"))
    found = diagnosis(
        layer(1, blame[0], notes=("of layer 1",)),
        layer(2, blame[1]),
        shapes,
        unexplained_blame=tuple(blame),
        notes=("a note on the whole",),
    )
    text = render_nothing_to_prove(found)
    assert text.startswith("FAIL")
    for words in (NOTHING, "k_norm is [1,2]", "a note on the whole", "k_proj (right)"):
        assert text.count(words) == 1, text
    assert "of layer 1" not in text
    of_shape = diagnosis(shapes, unexplained_blame=(blame[2],))
    assert "k_proj" not in render_nothing_to_prove(of_shape)


def test_record_tells_what_explains_each_part() -> None:
    blame = Blame(layer=2, sites=("k_norm",), reason="error")
    right = SiteDiagnosis(site=ModelSite.LOGITS, unexplained=1.0)
    record = diagnosis_record(
        diagnosis(layer(1, named=(finding("norm_eps"),)), sites=(right,), unexplained_blame=(blame,))
    )
    (of_layer,), (of_site,) = record["layers"], record["sites"]
    assert (of_layer["is_explained"], of_layer["is_right"]) == (True, False)
    assert (of_site["is_explained"], of_site["is_right"]) == (False, True)
    assert list(record["unexplained_blame"][0]["formulas"]) == ["k_norm"]
    # A proof is a key only where it was asked for.
    assert "proof" not in record["diagnosis"][0]


def test_rendered_proof_shows_lines_that_were_proved() -> None:
    proved = MistakeProof(outcome=ProofOutcome.PROVED, way=ProofWay.WEIGHTS, lines=("tensors['w'] *= 2",))
    text = render_proof(proved, layer=3, undone="norm_eps")
    assert text.startswith("Layer 3 without norm_eps: proved\n")
    assert "\n      tensors['w'] *= 2\n" in text
    assert MEND_FIRST in text
    refuted = MistakeProof(outcome=ProofOutcome.NOT_PROVED, lines=proved.lines)
    assert MEND_FIRST not in render_proof(refuted, layer=3, undone="norm_eps")

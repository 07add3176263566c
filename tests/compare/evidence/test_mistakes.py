from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, PassedOver
from compare.diagnosis.proof.proof import MEND_FIRST, MistakeProof, ProofOutcome
from compare.diagnosis.report import render_diagnosis
from compare.evidence.mistakes import word_diagnosis
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Blame

FINDING = MistakeFinding(
    layer=5,
    mistake="rope_theta",
    parameters=MappingProxyType({"theta": 10000.0}),
    explains=0.99,
    leaves=0.97,
    amplitude=1.0,
    z=80.0,
    what="The base of RoPE is another.",
    look_at="rope_theta",
)
LAYER = LayerDiagnosis(layer=5, unexplained=112.0, sites=(Site.OUTPUT,), named=(FINDING,), num_hypotheses=111)


def diagnosed(*layers: LayerDiagnosis, **parts: Any) -> Diagnosis:
    return Diagnosis(reference="golden", target="run", is_failed=True, layers=layers, **parts)


def test_layers_with_one_mistake_are_one_place_with_what_it_leaves() -> None:
    other = replace(LAYER, layer=6, named=(replace(FINDING, layer=6, leaves=1.04),), unexplained=120.0)
    run = word_diagnosis(diagnosed(LAYER, other))
    assert run.headline == "FAIL: layers 5-6, rope_theta (theta 1e+04)"
    (place,) = run.places
    assert (place.place, place.is_right, place.lies) == ("layers 5-6", False, ())
    assert place.outcome == "match rope_theta (theta 1e+04): leaves ρ 0.970 … 1.04 of 112 … 120"
    assert place.method == "111 hypotheses tried on each, judged by output"
    (mistake,) = place.mistakes
    assert (mistake.name, mistake.parameters, mistake.is_named) == ("rope_theta", "theta 1e+04", True)
    assert (mistake.leaves, mistake.proof) == ("0.970 … 1.04", ())


def test_layers_with_other_mistakes_are_places_of_their_own() -> None:
    other = replace(LAYER, layer=6, named=(replace(FINDING, layer=6, mistake="rope_missing"),))
    assert [place.place for place in word_diagnosis(diagnosed(LAYER, other)).places] == ["layer 5", "layer 6"]


def test_without_a_name_a_place_tells_what_the_terminal_tells() -> None:
    def unnamed(layer: int) -> LayerDiagnosis:
        blame = Blame(layer=layer, sites=("k_norm",), reason="error 112×", right=("k_proj",))
        near = replace(FINDING, layer=layer)
        return replace(LAYER, layer=layer, named=(), nearest=(near,), blame=(blame,), is_blamed=True)

    diagnosis = diagnosed(unnamed(0), unnamed(1), passed_over=(PassedOver(layers=(2, 3), like=(0, 1)),))
    (place,) = word_diagnosis(diagnosis).places
    assert (place.place, place.outcome) == ("layers 0-1", "no known mistake explains them (ρ 112)")
    assert [mistake.is_named for mistake in place.mistakes] == [False]
    text = " ".join(render_diagnosis(diagnosis, width=120, is_terminal=False).split())
    assert place.lies[0] == "Lies between k_proj (right) and k_norm (wrong)."
    assert place.lies[-1].startswith("2 more show the same pattern: layers 2-3.")
    assert all(sentence in text for sentence in (*place.lies, place.method, *place.notes))


def test_two_sites_of_one_operation_are_one_place_of_the_fault() -> None:
    blame = tuple(
        Blame(
            layer=5,
            sites=(f"{name}_rope",),
            reason="error",
            right=(f"{name}_norm",),
            operation="rotary embedding",
        )
        for name in "qk"
    )
    layer = replace(LAYER, named=(), blame=blame, is_blamed=True)
    (place,) = word_diagnosis(diagnosed(layer)).places
    assert place.lies[0] == (
        "Lies between q_norm, k_norm (right) and q_rope and k_rope (wrong); one cause, the rotary embedding."
    )
    apart = replace(layer, blame=tuple(replace(blamed, operation="") for blamed in blame))
    (place,) = word_diagnosis(diagnosed(apart)).places
    assert sum(sentence.startswith("Lies between") for sentence in place.lies) == 2


def test_blame_of_a_layer_that_was_not_diagnosed_is_a_place() -> None:
    blame = Blame(layer=7, sites=("k_norm",), reason="error 112×", right=("k_proj",))
    found = word_diagnosis(diagnosed(LAYER, unexplained_blame=(blame,)))
    assert [(place.place, place.outcome) for place in found.places[1:]] == [
        ("layer 7, k_norm", "not diagnosed")
    ]


def test_right_layer_has_no_nearest_mistake() -> None:
    right = replace(LAYER, named=(), nearest=(FINDING,), unexplained=0.9, is_blamed=False)
    (place,) = word_diagnosis(diagnosed(right)).places
    assert place.is_right
    assert place.mistakes == ()


def test_proof_is_told_in_the_words_of_the_terminal() -> None:
    proof = MistakeProof(outcome=ProofOutcome.PROVED, reason="all is right")
    run = word_diagnosis(diagnosed(replace(LAYER, named=(replace(FINDING, proof=proof),))))
    assert run.places[0].mistakes[0].proof == ("Proved: all is right.",)
    assert run.notes == (MEND_FIRST,)
    failed = replace(FINDING, proof=replace(proof, outcome=ProofOutcome.NOT_PROVED))
    assert word_diagnosis(diagnosed(replace(LAYER, named=(failed,)))).notes == ()

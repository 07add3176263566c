from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding
from compare.diagnosis.proof.proof import MistakeProof, ProofOutcome
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


def diagnosed(layer: LayerDiagnosis, *blame: Blame) -> Diagnosis:
    return Diagnosis(
        reference="golden", target="run", is_failed=True, layers=(layer,), unexplained_blame=blame
    )


def test_named_mistake_comes_first_with_what_it_leaves() -> None:
    (place,) = word_diagnosis(diagnosed(LAYER)).places
    assert (place.place, place.unexplained, place.is_right) == ("layer 5", 112.0, False)
    (mistake,) = place.mistakes
    assert (mistake.name, mistake.parameters, mistake.is_named) == ("rope_theta", "theta 1e+04", True)
    assert (mistake.leaves, mistake.proof) == (0.97, "")


def test_nearest_mistakes_are_no_names() -> None:
    near = replace(LAYER, named=(), nearest=(FINDING,))
    blame = Blame(layer=5, sites=("output",), reason="error 112×")
    found = word_diagnosis(diagnosed(near, blame))
    assert [mistake.is_named for mistake in found.places[0].mistakes] == [False]
    assert found.unexplained == ("layer 5, output: error 112×",)


def test_right_layer_has_no_nearest_mistake() -> None:
    right = replace(LAYER, named=(), nearest=(FINDING,), unexplained=0.9, is_blamed=False)
    (place,) = word_diagnosis(diagnosed(right)).places
    assert place.is_right
    assert place.mistakes == ()


def test_proof_is_told() -> None:
    proved = replace(FINDING, proof=MistakeProof(outcome=ProofOutcome.PROVED))
    (place,) = word_diagnosis(diagnosed(replace(LAYER, named=(proved,)))).places
    assert place.mistakes[0].proof == f"Undone in the port: {ProofOutcome.PROVED}."

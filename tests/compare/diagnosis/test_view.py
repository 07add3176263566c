"""A diagnosis in words: which place comes first, where a mistake lies, and what is told of it."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, PassedOver, SiteDiagnosis
from compare.diagnosis.proof import (
    MEND_FIRST,
    PROVE_THE_PLACE,
    MistakeProof,
    ProofOutcome,
    ProofWay,
    SiteProof,
    StageProof,
    word_proof,
)
from compare.diagnosis.view import formulas_of, word_diagnosis, word_lies_between
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Blame
from reports.page.evidence import DiagnosedPlace, TriedMistake

EMBEDDING, NORM, LOGITS = ModelSite.EMBEDDING, ModelSite.FINAL_NORM, ModelSite.LOGITS
PROVED, NOT_PROVED, NOT_PROVABLE = ProofOutcome.PROVED, ProofOutcome.NOT_PROVED, ProofOutcome.NOT_PROVABLE


def blamed(*sites: str, layer: int | None = 1, right: tuple[str, ...] = ("k_proj",), **parts: Any) -> Blame:
    return Blame(layer=layer, sites=sites, reason="error 9×", right=right, **parts)


def finding(mistake: str = "norm_eps", layer: int | None = None, **parts: Any) -> MistakeFinding:
    values = {"parameters": MappingProxyType({}), "explains": 0.9, "leaves": 1.1, "amplitude": 1.0, "z": 9.0}
    return MistakeFinding(
        **{"layer": layer, "mistake": mistake, "what": "It does.", "look_at": "it", **values, **parts}
    )


def site(name: ModelSite, *named: MistakeFinding, unexplained: float = 90.0, **parts: Any) -> SiteDiagnosis:
    return SiteDiagnosis(site=name, unexplained=unexplained, named=named, **parts)


def layer(number: int = 1, *blame: Blame, **parts: Any) -> LayerDiagnosis:
    return LayerDiagnosis(
        **{"layer": number, "sites": (Site.OUTPUT,), "unexplained": 90.0, "blame": blame, **parts}
    )


def diagnosis(**parts: Any) -> Diagnosis:
    return Diagnosis(**{"reference": "golden", "target": "run", "is_failed": True, "layers": (), **parts})


def only(**parts: Any) -> DiagnosedPlace:
    (place,) = word_diagnosis(diagnosis(**parts)).places
    return place


def tried(*findings: MistakeFinding) -> TriedMistake:
    """A mistake that explains a layer for each finding."""
    first, *_ = only(
        layers=tuple(layer(one.layer or 0, named=(replace(one, layer=one.layer or 0),)) for one in findings)
    ).mistakes
    return first


def test_places_are_told_in_the_models_order() -> None:
    found = diagnosis(layers=(layer(),), sites=(site(LOGITS), site(EMBEDDING), site(NORM, unexplained=1.0)))
    assert [place.place for place in word_diagnosis(found).places] == [
        "embedding",
        "layer 1",
        "logits",
        "final_norm",
    ]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"is_failed": False}, "PASS: nothing differs: there is nothing to diagnose"),
        (
            {"is_failed": False, "layers": (layer(is_blamed=False, unexplained=1.0),)},
            "PASS: nothing to explain",
        ),
        ({}, "FAIL: the comparison fails, and nothing was found to diagnose"),
        ({"sites": (site(NORM, finding(), finding("other")),)}, "FAIL: final_norm, norm_eps"),
        (
            {"sites": (site(NORM), site(LOGITS))},
            "FAIL: final_norm, no known mistake explains it (and 1 more place)",
        ),
        (
            {"layers": (layer(1, blamed("k_norm"), is_of_shape=True),)},
            "FAIL: layer 1, k_norm: the shape is wrong",
        ),
        (
            {
                "layers": (layer(1, blamed("k_norm")),),
                "passed_over": (PassedOver(layers=(0, 2), like=(1,)), PassedOver(layers=(5,), like=(4,))),
            },
            "FAIL: layers 0-2, k_norm: no known mistake explains it",
        ),
    ],
)
def test_headline_tells_the_first_wrong_place(parts: dict[str, Any], words: str) -> None:
    assert word_diagnosis(diagnosis(**parts)).headline == words


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (
            [blamed("k_norm", "k_rope")],
            "Lies between k_proj (right) and k_rope (wrong); k_norm not compared.",
        ),
        (
            [
                blamed("q_rope", right=("q_norm",), operation="rotary embedding"),
                blamed("k_rope", right=("k_norm",), operation="rotary embedding"),
            ],
            "Lies between q_norm, k_norm (right) and q_rope and k_rope (wrong); one cause, the rotary embedding.",
        ),
        ([blamed("k_norm", "k_rope", right=())], "Lies in k_rope: error 9×."),
    ],
)
def test_place_of_a_mistake_is_between_right_and_wrong(cause: list[Blame], words: str) -> None:
    assert word_lies_between(cause) == words


def test_formulas_of_few_suspects_are_told() -> None:
    assert list(formulas_of(blamed("q_norm", "k_norm", "k_rope"))) == ["q_norm", "k_norm", "k_rope"]
    assert formulas_of(blamed("q_norm", "k_norm", "q_rope", "k_rope")) == {}
    assert list(formulas_of(blamed("logits", layer=None))) == ["logits"]


def test_layers_that_nothing_names_tell_where_the_mistake_lies_and_which_are_like_them() -> None:
    near = finding(layer=1)
    unnamed = layer(1, blamed("k_norm"), nearest=(near,), num_hypotheses=12)
    place = only(
        layers=(unnamed, replace(unnamed, layer=2, num_hypotheses=300)),
        passed_over=(PassedOver(layers=(3, 4), like=(1, 2)), PassedOver(layers=(9,), like=(8,))),
    )
    assert (place.place, place.outcome) == ("layers 1-2", "no known mistake explains them (ρ 90.0)")
    assert place.lies[0] == "Lies between k_proj (right) and k_norm (wrong)."
    assert place.lies[-1].startswith("2 more show the same pattern: layers 3-4.")
    assert place.method == "12 … 300 hypotheses tried on each, judged by output"
    assert [mistake.is_named for mistake in place.mistakes] == [False]


def test_layers_with_one_mistake_are_one_place_with_what_it_leaves() -> None:
    named = [
        finding("k_norm_scaled", layer=number, leaves=leaves, parameters={"factor": factor})
        for number, leaves, factor in ((1, 0.97, 0.5), (2, 1.04, 0.51))
    ]
    place = only(layers=tuple(layer(one.layer, named=(one,)) for one in named))
    assert place.outcome == "match k_norm_scaled (factor 0.5 … 0.51): leaves ρ 0.970 … 1.04 of 90.0"
    (mistake,) = place.mistakes
    assert (mistake.name, mistake.parameters, mistake.layers) == ("k_norm_scaled", "factor 0.5 … 0.51", "")
    assert mistake.fit == "Explains 90 % of the error; amplitude 1.000, 9.00 times its uncertainty."
    # What explains one of them as well is told with its layer.
    other = layer(2, named=(named[1], finding("other", layer=2)))
    *_, alike = only(layers=(layer(1, named=(named[0],)), other)).mistakes
    assert (alike.name, alike.layers) == ("other", "in layer 2")


def test_wrong_shape_tells_whether_others_were_judged() -> None:
    wrong = layer(1, blamed("k_norm"), is_of_shape=True, notes=("k_norm: [1,2]",))
    place = only(layers=(wrong,))
    assert place.outcome == "the shape is wrong, and no other site fails (ρ 90.0)"
    assert (place.method, place.notes) == (
        "No mistake of the catalogue was tried: none changes a shape.",
        ("k_norm: [1,2]",),
    )
    assert only(layers=(replace(wrong, sites=()),)).outcome == "the shape is wrong"


def test_right_sites_are_told_of_a_wrong_run_alone() -> None:
    right = (site(EMBEDDING, unexplained=1.0), site(NORM, unexplained=1.5))
    *_, place = word_diagnosis(diagnosis(sites=(*right, site(LOGITS)))).places
    assert (place.place, place.outcome) == (
        "embedding, final_norm",
        "nothing to explain (ρ 1.00 … 1.50 on the port's own input)",
    )
    assert word_diagnosis(diagnosis(is_failed=False, sites=right)).places == ()
    # Of right layers, the nearest mistakes explain nothing.
    assert only(layers=(layer(is_blamed=False, unexplained=1.0, nearest=(finding(),)),)).mistakes == ()


def test_blame_is_told_once() -> None:
    outside, inside, passed, unseen = (
        blamed("logits", layer=None),
        blamed("k_norm", layer=1),
        blamed("k_norm", layer=2),
        blamed("v_proj", layer=3),
    )
    found = diagnosis(
        layers=(layer(1, inside),),
        sites=(site(LOGITS),),
        passed_over=(PassedOver(layers=(2,), like=(1,)),),
        unexplained_blame=(outside, inside, passed, unseen),
    )
    told = [place.place for place in word_diagnosis(found).places if place.outcome == "not diagnosed"]
    assert told == ["layer 3, v_proj"]
    weights = Blame(layer=4, sites=("weights",), reason="w1 is that of expert 3")
    place = only(weights=(weights, replace(weights, layer=5)))
    assert (place.place, place.outcome, place.lies) == (
        "layers 4-5",
        "the weights are wrong",
        (weights.reason,),
    )


SITES = (
    SiteProof(site="k_norm", before=200.0, after=None, is_right=True, is_replaced=True),
    SiteProof(site="attn_delta", before=90.0, after=1.0, is_right=True),
    SiteProof(site="router_experts", before=None, after=None, is_right=True),
    SiteProof(site="output", before=30.0, after=1.1, is_right=True),
)
FIGURES = "(attn_delta ρ 90.0 → 1.00; output ρ 30.0 → 1.10)"
STAGE = StageProof(leaves=1.0, unexplained=50.0)


def proof(outcome: ProofOutcome = PROVED, **parts: Any) -> MistakeProof:
    return MistakeProof(outcome=outcome, **parts)


@pytest.mark.parametrize(
    ("found", "sentences"),
    [
        (
            proof(NOT_PROVABLE, reason="there is no port", next_step="Run one."),
            ["Not provable here: there is no port. Run one."],
        ),
        (
            proof(NOT_PROVED, reason="it is wrong", stage=STAGE),
            ["Not proved: it is wrong; the mistake leaves ρ 1.00 of 50.0 of what the stage gave."],
        ),
        (
            proof(way=ProofWay.STAGE, sites=SITES, stage=STAGE),
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


def test_layers_of_one_outcome_are_told_together() -> None:
    wrong = proof(NOT_PROVABLE, reason="no port")
    found = tried(
        finding(layer=1, proof=proof(way=ProofWay.WEIGHTS)),
        finding(layer=2, proof=wrong),
        finding(layer=3, proof=wrong),
        finding(layer=4),
    )
    assert found.proof[0].startswith("Layer 1: Proved: ")
    assert found.proof[1:] == ("Layers 2-3: Not provable here: no port.",)
    assert tried(finding(layer=2, proof=wrong)).proof == ("Not provable here: no port.",)
    assert tried(finding(layer=4)).proof == ()


def test_lines_of_several_layers_stand_once() -> None:
    def edited(number: int, times: int, outcome: ProofOutcome = PROVED, **parts: Any) -> MistakeFinding:
        edit = (f"tensors['w'] *= {times}",)
        return finding(layer=number, proof=proof(outcome, edit=edit, num_layers=9, **parts))

    found = tried(edited(1, 2), edited(3, 2), edited(4, 5, has_conversion=False), edited(5, 7, NOT_PROVED))
    first, second = (edit.splitlines() for edit in found.edits)
    assert first == [
        "# Lines that undo it, at the beginning of convert_state_dict:",
        "if layer_idx in (1, 3):",
        "    tensors['w'] *= 2",
        f"# {PROVE_THE_PLACE}",
    ]
    assert second[0] == "# Lines that undo it, in the port's class:"


@pytest.mark.parametrize(("outcome", "notes"), [(PROVED, (MEND_FIRST,)), (NOT_PROVED, ()), (None, ())])
def test_mending_is_asked_for_where_a_mistake_was_proved(
    outcome: ProofOutcome | None, notes: tuple[str, ...]
) -> None:
    named = finding(layer=1, proof=None if outcome is None else proof(outcome))
    assert word_diagnosis(diagnosis(layers=(layer(1, named=(named,)),))).notes == notes

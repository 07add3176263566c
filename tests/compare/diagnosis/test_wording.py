"""A diagnosis in words: which part comes first, where a mistake lies, and what is told of it."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, PassedOver, SiteDiagnosis
from compare.diagnosis.layer_group import LayerGroup, group_layers
from compare.diagnosis.proof.proof import MEND_FIRST, MistakeProof, ProofOutcome
from compare.diagnosis.report import (
    diagnosis_record,
    formulas_of,
    parts_of,
    passed_over_like,
    render_diagnosis,
    untold_blame,
    word_headline,
    word_lies_between,
    word_method,
    word_mistake,
    word_passed_over,
    word_right_sites,
    word_shape_outcome,
    word_suspects,
    word_where,
)
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Blame

EMBEDDING, NORM, LOGITS = ModelSite.EMBEDDING, ModelSite.FINAL_NORM, ModelSite.LOGITS


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


def told(found: Diagnosis, **options: Any) -> str:
    return render_diagnosis(found, width=300, is_terminal=False, **options)


def test_parts_are_told_in_the_models_order() -> None:
    found = diagnosis(layers=(layer(),), sites=(site(LOGITS), site(EMBEDDING), site(NORM, unexplained=1.0)))
    assert [getattr(part, "site", None) for part in parts_of(found)] == [EMBEDDING, None, LOGITS]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"is_failed": False}, "nothing differs: there is nothing to diagnose"),
        ({"is_failed": False, "layers": (layer(is_blamed=False, unexplained=1.0),)}, "nothing to explain"),
        ({}, "the comparison fails, and nothing was found to diagnose"),
        ({"sites": (site(NORM),)}, "final_norm, no known mistake explains it"),
        ({"sites": (site(NORM, finding(), finding("other")),)}, "final_norm, norm_eps"),
        (
            {"sites": (site(NORM), site(LOGITS))},
            "final_norm, no known mistake explains it (and 1 more place)",
        ),
        (
            {"layers": (layer(1, blamed("k_norm"), is_of_shape=True),)},
            "layer 1, k_norm: the shape is wrong",
        ),
        (
            {
                "layers": (layer(1, blamed("k_norm")),),
                "passed_over": (PassedOver(layers=(0, 2), like=(1,)), PassedOver(layers=(5,), like=(4,))),
            },
            "layers 0-2, k_norm: no known mistake explains it",
        ),
    ],
)
def test_headline_tells_the_first_wrong_place(parts: dict[str, Any], words: str) -> None:
    found = diagnosis(**parts)
    assert word_headline(found, parts_of(found)) == words


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ([blamed("k_norm")], "Lies between k_proj (right) and k_norm (wrong)."),
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


def test_suspects_of_one_cause_are_joined() -> None:
    assert word_suspects([blamed("k_norm", "k_rope"), blamed("q_rope")]) == "k_norm, k_rope and q_rope"


def test_formulas_of_few_suspects_are_told() -> None:
    assert list(formulas_of(blamed("q_norm", "k_norm", "k_rope"))) == ["q_norm", "k_norm", "k_rope"]
    assert formulas_of(blamed("q_norm", "k_norm", "q_rope", "k_rope")) == {}
    assert list(formulas_of(blamed("logits", layer=None))) == ["logits"]


def test_layers_that_were_passed_over_are_told_at_those_that_they_are_like() -> None:
    (group,) = group_layers([layer(1, blamed("k_norm"))])
    found = diagnosis(
        passed_over=(PassedOver(layers=(2, 3), like=(0, 1)), PassedOver(layers=(9,), like=(4,)))
    )
    assert passed_over_like(group, found) == (2, 3)
    assert word_passed_over(group, diagnosis()) == ()
    assert word_passed_over(group, found)[0].startswith("2 more show the same pattern: layers 2-3.")
    one = diagnosis(passed_over=(PassedOver(layers=(2,), like=(1,)),))
    assert word_passed_over(group, one)[0].startswith("1 more shows the same pattern: layer 2.")


def group_of(*layers: LayerDiagnosis) -> LayerGroup:
    (group,) = group_layers(layers)
    return group


def test_method_tells_hypotheses_and_judging_sites() -> None:
    first = layer(1, sites=(Site.K_NORM, Site.OUTPUT), num_hypotheses=12)
    assert word_method(group_of(first)) == "12 hypotheses tried, judged by k_norm, output"
    second = replace(first, layer=2, num_hypotheses=300)
    assert (
        word_method(group_of(first, second)) == "12 … 300 hypotheses tried on each, judged by k_norm, output"
    )


def test_wrong_shape_tells_whether_others_were_judged() -> None:
    wrong = layer(1, is_of_shape=True)
    assert word_shape_outcome(group_of(wrong)) == "the shape is wrong, and no other site fails (ρ 90.0)"
    assert word_shape_outcome(group_of(replace(wrong, sites=()))) == "the shape is wrong"


def test_right_sites_are_told_of_a_wrong_run_alone() -> None:
    right = (site(EMBEDDING, unexplained=1.0), site(NORM, unexplained=1.5), site(LOGITS))
    words = "embedding, final_norm: nothing to explain (ρ 1.00 … 1.50 on the port's own input)"
    assert word_right_sites(diagnosis(sites=right)) == words
    assert word_right_sites(diagnosis(sites=right[2:])) == ""
    assert word_right_sites(diagnosis(is_failed=False, sites=right[:2])) == ""
    assert words in told(diagnosis(sites=right))


def test_blame_is_told_once() -> None:
    outside, inside, passed, unseen = (
        blamed("logits", layer=None),
        blamed("k_norm", layer=1),
        blamed("k_norm", layer=2),
        blamed("v_proj", layer=3),
    )
    found = diagnosis(
        layers=(layer(1, inside),),
        sites=(site(LOGITS), site(NORM, unexplained=1.0)),
        passed_over=(PassedOver(layers=(2,), like=(1,)),),
        unexplained_blame=(outside, inside, passed, unseen),
    )
    assert untold_blame(found) == ((unseen,),)
    text = told(found)
    assert "Layer 3, v_proj: not diagnosed" in text
    assert "v_proj (wrong)" in text
    norm = blamed("final_norm", layer=None)
    assert untold_blame(replace(found, unexplained_blame=(norm,))) == ((norm,),)


def test_parameters_of_a_group_are_ranges_of_fractions_and_single_others() -> None:
    findings = [
        finding(
            "q_norm_scaled", layer=number, parameters=MappingProxyType({"factor": factor, "tensor": "w1"})
        )
        for number, factor in ((1, 0.5), (2, 0.25))
    ]
    assert word_mistake(findings) == "q_norm_scaled (factor 0.25 … 0.5, tensor w1)"
    assert word_mistake([finding()]) == "norm_eps"
    group = group_of(layer(1, named=findings[:1]), layer(2, named=findings[:1]))
    assert word_where(findings, group) == ""
    assert word_where(findings[:1], group) == " in layer 1"


class TestSites:
    def test_named_mistake_is_drawn_with_what_resembles_it(self) -> None:
        named = site(
            NORM, finding(sources=("vllm#1", "vllm#2")), finding("other", leaves=2.0), num_hypotheses=7
        )
        text = told(diagnosis(sites=(named,)))
        assert "final_norm matches norm_eps: leaves ρ 1.10 of 90.0" in text
        assert "Cannot be told from: other, which leaves ρ 2.00." in text
        assert "Seen in vllm#1, vllm#2." in text
        assert "7 hypotheses tried on the port's own input" in text

    def test_mistake_without_others_or_sources_says_nothing_of_them(self) -> None:
        text = told(diagnosis(sites=(site(NORM, finding()),)))
        assert "Cannot be told from" not in text
        assert "Seen in" not in text

    def test_unnamed_mistake_is_drawn_with_the_formula(self) -> None:
        text = told(diagnosis(sites=(site(LOGITS, notes=("7 tokens left out",)),), notes=("on the whole",)))
        assert "logits: no known mistake explains it (ρ 90.0)" in text
        assert "Original: logits = " in text
        assert "- 7 tokens left out" in text
        assert "- on the whole" in text


class TestReport:
    def test_nothing_to_prove_is_said_where_proofs_were_asked_for(self) -> None:
        nothing = "Nothing to prove: no mistake was named."
        assert nothing in told(diagnosis(), proves=True)
        assert nothing not in told(diagnosis())
        assert nothing not in told(diagnosis(sites=(site(NORM, finding()),)), proves=True)

    def test_wrong_shape_is_drawn_with_its_notes(self) -> None:
        wrong = layer(1, blamed("k_norm"), is_of_shape=True, notes=("k_norm: [1,2]",), num_hypotheses=0)
        text = told(diagnosis(layers=(wrong,)))
        assert "Layer 1: the shape is wrong, and no other site fails (ρ 90.0)" in text
        assert "No mistake of the catalogue was tried: none changes a shape." in text
        assert "- k_norm: [1,2]" in text
        assert "hypotheses tried" not in text

    def test_three_look_alikes_are_listed(self) -> None:
        named = tuple(finding(f"mistake_{number}", layer=1) for number in range(6))
        text = told(diagnosis(layers=(layer(1, named=named),)))
        assert "mistake_3, which leaves ρ 1.10; 2 more." in text
        three = told(diagnosis(layers=(layer(1, named=named[:4]),)))
        assert "mistake_3, which leaves ρ 1.10." in three
        assert "more" not in three.partition("Cannot be told")[2]

    def test_mending_is_asked_for_where_a_mistake_was_proved(self) -> None:
        for outcome, is_told in (
            (ProofOutcome.PROVED, True),
            (ProofOutcome.NOT_PROVED, False),
            (None, False),
        ):
            proof = None if outcome is None else MistakeProof(outcome=outcome, reason="")
            found = diagnosis(layers=(layer(1, named=(finding(layer=1, proof=proof),)),))
            assert (MEND_FIRST in told(found)) is is_told
            assert ("proof" in diagnosis_record(found)["diagnosis"][0]) is (proof is not None)

    def test_record_tells_what_explains_each_part(self) -> None:
        record = diagnosis_record(
            diagnosis(
                layers=(layer(1, named=(finding(layer=1),)),),
                sites=(site(LOGITS, unexplained=1.0),),
                unexplained_blame=(blamed("k_norm"),),
            )
        )
        (of_layer,), (of_site,) = record["layers"], record["sites"]
        assert (of_layer["is_explained"], of_layer["is_right"]) == (True, False)
        assert (of_site["is_explained"], of_site["is_right"]) == (False, True)
        assert list(record["unexplained_blame"][0]["formulas"]) == ["k_norm"]

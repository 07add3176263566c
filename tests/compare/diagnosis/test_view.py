"""A diagnosis in words, told in a golden text; in the record, and what no text shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, PassedOver, SiteDiagnosis
from compare.diagnosis.proof import MistakeProof, ProofOutcome, ProofWay, SiteProof, StageProof
from compare.diagnosis.report import diagnosis_record, render_diagnosis, render_proof
from compare.diagnosis.view import word_diagnosis
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Blame
from reports.page.evidence import DiagnosedPlace

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


def explained(*findings: MistakeFinding) -> tuple[LayerDiagnosis, ...]:
    """A layer for each finding, which explains it."""
    return tuple(layer(one.layer or 0, named=(one,)) for one in findings)


def diagnosis(*layers: LayerDiagnosis, **parts: Any) -> Diagnosis:
    return Diagnosis(**{"reference": "golden", "target": "run", "is_failed": True, "layers": layers, **parts})


def proof(outcome: ProofOutcome = PROVED, **parts: Any) -> MistakeProof:
    return MistakeProof(outcome=outcome, **parts)


def proved(found: MistakeProof) -> Diagnosis:
    return diagnosis(*explained(finding(layer=1, proof=found)))


def edited(number: int, times: int, outcome: ProofOutcome = PROVED, **parts: Any) -> MistakeFinding:
    """A mistake that is undone in the weights by another line for each number of times."""
    edit = (f"tensors['w'] *= {times}",)
    found = proof(outcome, way=ProofWay.WEIGHTS, edit=edit, num_layers=9, **parts)
    return finding(layer=number, proof=found)


SITES = (
    SiteProof(site="k_norm", before=200.0, after=None, is_right=True, is_replaced=True),
    SiteProof(site="attn_delta", before=90.0, after=1.0, is_right=True),
    SiteProof(site="router_experts", before=None, after=None, is_right=True),
    SiteProof(site="output", before=30.0, after=1.1, is_right=True),
)
STAGE = StageProof(leaves=1.0, unexplained=50.0)
RIGHT = {"is_blamed": False, "unexplained": 1.02}
UNNAMED = layer(1, blamed("k_norm"), nearest=(finding(layer=1),), num_hypotheses=12)
WRONG_SHAPE = layer(1, blamed("k_norm"), is_of_shape=True, notes=("k_norm: [1,2]",))
SCALED = [
    finding("k_norm_scaled", layer=number, leaves=leaves, parameters={"factor": factor})
    for number, leaves, factor in ((1, 0.97, 0.5), (2, 1.04, 0.51))
]
WEIGHTS = Blame(layer=4, sites=("weights",), reason="w1 is that of expert 3")
# Of two layers, the second is explained by another mistake as well.
PROOFS = [proof(NOT_PROVED), proof(PROVED)]
PLACES: dict[str, Diagnosis] = {
    "places are told in the model's order": diagnosis(
        layer(), sites=(site(LOGITS), site(EMBEDDING), site(NORM, unexplained=1.0))
    ),
    "nothing differs": diagnosis(is_failed=False),
    "nothing to explain": diagnosis(layer(**RIGHT), is_failed=False),
    "right sites of a right run are not told": diagnosis(
        is_failed=False, sites=(site(EMBEDDING, unexplained=1.0), site(NORM, unexplained=1.5))
    ),
    "the comparison alone fails": diagnosis(),
    "a site outside the layers, and one like it": diagnosis(
        sites=(site(NORM, finding(), finding("other"), num_hypotheses=3),)
    ),
    "two sites, and right ones": diagnosis(
        sites=(site(EMBEDDING, unexplained=1.0), site(NORM, nearest=(finding(),)), site(LOGITS))
    ),
    "a wrong shape, and no other site": diagnosis(replace(WRONG_SHAPE, sites=())),
    "a wrong shape": diagnosis(WRONG_SHAPE),
    "layers like others": diagnosis(
        UNNAMED,
        replace(UNNAMED, layer=2, num_hypotheses=300),
        passed_over=(PassedOver(layers=(3, 4), like=(1, 2)), PassedOver(layers=(9,), like=(8,))),
    ),
    "one layer passed over": diagnosis(UNNAMED, passed_over=(PassedOver(layers=(0,), like=(1,)),)),
    "right layers beside a wrong one": diagnosis(
        layer(0, **RIGHT), UNNAMED, layer(2, **RIGHT), layer(3, blamed("v_proj", layer=3))
    ),
    "a blamed layer is not right however small its error": diagnosis(
        layer(0, blamed("k_norm", layer=0), unexplained=1.02)
    ),
    "several suspects": diagnosis(layer(1, blamed("k_norm", "k_rope"))),
    "suspects of which nothing is right": diagnosis(layer(1, blamed("k_norm", "k_rope", right=()))),
    "more suspects than formulas": diagnosis(layer(1, blamed("q_norm", "k_norm", "q_rope", "k_rope"))),
    "two sites of one operation": diagnosis(
        layer(
            1,
            blamed("q_rope", right=("q_norm",), operation="rotary embedding"),
            blamed("k_rope", right=("k_norm",), operation="rotary embedding"),
        )
    ),
    "layers of one mistake": diagnosis(*explained(*SCALED)),
    "one of them explained by another too": diagnosis(
        layer(1, named=(SCALED[0],)), layer(2, named=(SCALED[1], finding("other", layer=2)))
    ),
    "notes of some layers say which": diagnosis(
        layer(0, named=(finding(layer=0),), notes=("one NaN", "no FP8")),
        layer(1, named=(finding(layer=1),), notes=("no FP8",)),
        notes=("on the whole",),
    ),
    "blame is told once": diagnosis(
        layer(1, blamed("k_norm")),
        sites=(site(LOGITS),),
        passed_over=(PassedOver(layers=(2,), like=(1,)),),
        unexplained_blame=(
            blamed("logits", layer=None),
            blamed("k_norm", layer=1),
            blamed("k_norm", layer=2),
            blamed("v_proj", layer=3),
        ),
    ),
    "wrong weights": diagnosis(weights=(WEIGHTS, replace(WEIGHTS, layer=5))),
    "sources, and more mistakes alike than are listed": diagnosis(
        layer(
            1,
            named=(
                finding("norm_eps", layer=1, sources=("vllm#1", "vllm#2")),
                *(finding(f"mistake_{number}", layer=1) for number in range(5)),
            ),
            num_hypotheses=7,
        )
    ),
}
PROVED_PLACES: dict[str, Diagnosis] = {
    "not provable": proved(proof(NOT_PROVABLE, reason="there is no port", next_step="Run one.")),
    "refuted by the stage": proved(proof(NOT_PROVED, reason="it is wrong", stage=STAGE)),
    "right values of a stage": proved(proof(way=ProofWay.STAGE, sites=SITES, stage=STAGE)),
    "recomputed": proved(proof(way=ProofWay.RECOMPUTED)),
    "weights and stage, and something is left": proved(
        proof(
            NOT_PROVED,
            way=ProofWay.WEIGHTS_AND_STAGE,
            reason="output fails",
            sites=SITES,
            remaining=("norm_eps", "other"),
        )
    ),
    "weights, and something is left": proved(
        proof(NOT_PROVED, way=ProofWay.WEIGHTS, reason="output fails", sites=SITES[3:])
    ),
    "layers of one outcome are told together": diagnosis(
        *explained(
            finding(layer=1, proof=proof(way=ProofWay.WEIGHTS)),
            *(finding(layer=number, proof=proof(NOT_PROVABLE, reason="no port")) for number in (2, 3)),
            finding(layer=4),
        )
    ),
    "lines of several layers stand once": diagnosis(
        *explained(edited(1, 2), edited(3, 2), edited(4, 5, has_conversion=False), edited(5, 7, NOT_PROVED))
    ),
    "three edits, and where the others are": diagnosis(
        *explained(*(edited(number, number + 2) for number in range(4)))
    ),
    "outcomes of a mistake that is like the first": diagnosis(
        *tuple(
            (
                layer(
                    number,
                    named=(
                        finding("first", layer=number, proof=PROOFS[0]),
                        finding("second", layer=number, proof=found),
                    ),
                )
                for number, found in enumerate(PROOFS)
            )
        )
    ),
    "nothing to prove": diagnosis(UNNAMED),
}
LINES = ("tensors['w'] *= 2",)


def test_diagnoses_read_as_their_golden_text(expect_text: Callable[..., None]) -> None:
    shown = {"width": 100, "is_terminal": False}
    places = {title: render_diagnosis(found, **shown) for title, found in PLACES.items()}
    with_proofs = {
        title: render_diagnosis(found, proves=True, **shown) for title, found in PROVED_PLACES.items()
    }
    proofs = {
        f"proof of a layer: {outcome}": render_proof(
            proof(outcome, way=ProofWay.WEIGHTS, lines=LINES, reason="it is wrong"),
            layer=3,
            undone="norm_eps",
        )
        for outcome in (PROVED, NOT_PROVED)
    }
    expect_text("diagnosis.txt", {**places, **with_proofs, **proofs})


def only(*layers: LayerDiagnosis) -> DiagnosedPlace:
    (place,) = word_diagnosis(diagnosis(*layers)).places
    return place


def test_nearest_mistakes_are_hints_and_explain_no_right_layer() -> None:
    assert [mistake.is_named for mistake in only(UNNAMED).mistakes] == [False]
    assert only(layer(**RIGHT, nearest=(finding(),))).mistakes == ()


def test_mistake_of_all_layers_names_none() -> None:
    (mistake,) = only(*explained(*SCALED)).mistakes
    assert (mistake.name, mistake.parameters, mistake.layers) == ("k_norm_scaled", "factor 0.5 … 0.51", "")


def test_record_tells_what_explains_each_part() -> None:
    blame = Blame(layer=2, sites=("k_norm",), reason="error")
    layers = (layer(1, named=(finding(layer=1),)), layer(2, nearest=(finding(layer=2),)))
    found = diagnosis(*layers, sites=(site(LOGITS, unexplained=1.0),), unexplained_blame=(blame,))
    record = diagnosis_record(found)
    (first, second), (of_site,) = record["layers"], record["sites"]
    assert (first["layer"], first["is_explained"], first["is_right"]) == (1, True, False)
    assert (of_site["is_explained"], of_site["is_right"]) == (False, True)
    assert [one["is_hint"] for one in (*record["diagnosis"], *second["nearest"])] == [False, True]
    assert list(record["unexplained_blame"][0]["formulas"]) == ["k_norm"]
    # A proof is a key only where it was asked for.
    assert "proof" not in record["diagnosis"][0]

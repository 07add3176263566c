"""Findings: what a score becomes, when a layer, a site and a whole diagnosis are right, and which layers share one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from compare.catalogue.mistake import Hypothesis, Mistake
from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, PassedOver, SiteDiagnosis
from compare.diagnosis.layer_group import group_layers, withdraw_rare, withdraw_unequal
from compare.diagnosis.score import Score
from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.reference.evaluation import replace_stage
from minimax_tools.results.results import Blame, Verdict

SPEC: Any = SimpleNamespace(name="spec", family=MINIMAX_M2)


def mistake(name: str, *sites: Site, **options: Any) -> Mistake:
    def build(**_: Any) -> Any:
        change = replace_stage(sites[0], lambda _: torch.zeros(1))
        for site in sites[1:]:
            change = change.and_also(replace_stage(site, lambda _: torch.zeros(1)))
        return change

    return Mistake(name=name, build=build, **options)


FIRST = mistake(
    "rope_theta",
    Site.K_ROPE,
    Site.Q_ROPE,
    detail=lambda spec, parameters: f"{spec.name} {parameters['theta']}",
)
SECOND = mistake("gate_up_swapped", Site.MOE_DELTA)


def score(hypothesis: Hypothesis, *, explains: float = 0.5, is_decode_only: bool = False) -> Score:
    figures = {"leaves": 1.1, "unexplained": 9.0, "misfit": 1.2, "amplitude": 0.9, "z": 7.0, "likeness": 0.8}
    return Score(hypothesis=hypothesis, is_decode_only=is_decode_only, explains=explains, **figures)


@pytest.mark.parametrize(
    ("site", "is_of_attention"),
    [(Site.K_ROPE, True), (Site.ATTN_RESIDUAL, True), (Site.POST_NORM, False), (Site.MOE_DELTA, False)],
)
def test_hypothesis_of_attention_begins_before_the_experts(site: Site, is_of_attention: bool) -> None:
    one = mistake("one", site).with_parameters({})
    assert one.is_of_attention is is_of_attention
    # With another of attention, they are.
    assert mistake("two", Site.Q_PROJ).with_parameters({}).and_also(one).is_of_attention


def test_two_together_are_no_rounding() -> None:
    rounding = mistake("rounding", Site.Q_PROJ, is_rounding=True).with_parameters({})
    other = SECOND.with_parameters({})
    nothing = Hypothesis(mistakes=(), parameters=(), change=rounding.change)
    both = rounding.and_also(other)
    assert [one.is_rounding for one in (rounding, other, both, nothing)] == [True, False, False, False]


FINDING = MistakeFinding.of(1, score(SECOND.with_parameters({})), spec=SPEC)
NAMED = {"named": (FINDING,)}


@pytest.mark.parametrize(
    ("layer", "is_right"),
    [
        ({"unexplained": 2.0, "is_blamed": False}, True),
        ({"unexplained": 2.1, "is_blamed": False}, False),
        # Blamed unless told.
        ({"unexplained": 1.0}, False),
        ({"unexplained": 1.0, "is_blamed": False, **NAMED}, False),
    ],
)
def test_right_layer(layer: dict[str, Any], is_right: bool) -> None:
    assert LayerDiagnosis(layer=1, sites=(Site.OUTPUT,), **layer).is_right is is_right


@pytest.mark.parametrize(
    ("site", "is_right"),
    [
        ({"unexplained": 2.0, "is_blamed": True}, True),
        ({"unexplained": 2.1, "is_blamed": True}, False),
        # A right port may sum in BF16: a site that is not blamed may be off by more.
        ({"unexplained": 10.0, "is_blamed": False}, True),
        ({"unexplained": 10.1, "is_blamed": False}, False),
        ({"unexplained": 1.0, "is_blamed": False, **NAMED}, False),
    ],
)
def test_right_site(site: dict[str, Any], is_right: bool) -> None:
    assert SiteDiagnosis(site=ModelSite.LOGITS, **site).is_right is is_right


def diagnosis(**parts: Any) -> Diagnosis:
    return Diagnosis(
        **{"reference": "golden", "target": "run", "is_failed": False, "layers": (), "sites": (), **parts}
    )


def test_findings_are_in_the_models_order() -> None:
    def named(name: str) -> tuple[MistakeFinding, ...]:
        return (replace(FINDING, mistake=name),)

    sites = tuple(
        SiteDiagnosis(site=site, unexplained=9.0, named=named(str(site)))
        for site in (ModelSite.FINAL_NORM, ModelSite.LOGITS, ModelSite.EMBEDDING)
    )
    layer = LayerDiagnosis(layer=1, sites=(), unexplained=9.0, named=named("layer"))
    found = [finding.mistake for finding in diagnosis(layers=(layer,), sites=sites).findings]
    assert found == ["embedding", "layer", "final_norm", "logits"]


def test_verdict() -> None:
    right = LayerDiagnosis(layer=1, sites=(), unexplained=1.0, is_blamed=False)
    wrong = SiteDiagnosis(site=ModelSite.LOGITS, unexplained=99.0)
    for found, verdict in (
        (diagnosis(layers=(right,)), Verdict.PASS),
        (diagnosis(is_failed=True), Verdict.FAIL),
        (diagnosis(sites=(wrong,)), Verdict.FAIL),
        (diagnosis(layers=(replace(right, named=(FINDING,)),)), Verdict.FAIL),
    ):
        assert (found.verdict, found.exit_code) == (verdict, verdict.exit_code)


SWAPPED, MISSING, SCALED = "gate_up_swapped", "qk_norm_missing", "moe_delta_scaled"


def finding(layer: int, mistake: str = SWAPPED, **parameters: float | str) -> MistakeFinding:
    given = MappingProxyType(dict(parameters))
    return replace(FINDING, layer=layer, mistake=mistake, parameters=given, explains=0.99, z=300.0)


def layer(
    number: int, *named: MistakeFinding, nearest: tuple[MistakeFinding, ...] = (), site: str = "moe_delta"
) -> LayerDiagnosis:
    return LayerDiagnosis(
        blame=(Blame(layer=number, sites=(site,), reason="error 9×", right=("post_norm",)),),
        layer=number,
        sites=(Site.MOE_DELTA,),
        unexplained=100.0,
        named=named,
        nearest=nearest,
        num_hypotheses=12,
    )


def word_finding(found: MistakeFinding) -> str:
    return "\n".join(f"{field.name}: {getattr(found, field.name)}" for field in fields(found))


def word_groups(*layers: LayerDiagnosis) -> str:
    lines = []
    for group in group_layers(layers):
        findings = [group.named, *group.others] if group.named else []
        names = [", ".join(one.mistake for one in alike) for alike in findings]
        lines.append(f"layers {', '.join(map(str, group.numbers))}: {' | '.join(names) or 'nothing'}")
    return "\n".join(lines)


def word_layers(layers: Sequence[LayerDiagnosis]) -> str:
    """Return the names that each layer keeps, and its notes."""
    return "\n".join(
        f"layer {one.layer}: {', '.join(found.mistake for found in one.named) or 'nothing'}"
        + "".join(f"\n  {note}" for note in one.notes)
        for one in layers
    )


def rare(*layers: LayerDiagnosis, passed: tuple[PassedOver, ...] = ()) -> str:
    return word_layers(withdraw_rare(layers, passed))


def test_findings_read_as_their_golden_text(expect_text: Callable[..., None]) -> None:
    factors, tensors = (0.350, 0.354, 0.8), ("w1", "w2")
    query, key = finding(0, "q_norm_scaled"), finding(0, "k_norm_scaled")
    by_factor = [layer(n, finding(n, "k_norm_scaled", factor=factor)) for n, factor in enumerate(factors)]
    by_tensor = [layer(n, finding(n, "fp8_scale_missing", tensor=name)) for n, name in enumerate(tensors)]
    of_shape = [replace(layer(number), is_of_shape=number != 1) for number in range(3)]
    groups = {
        "layers of one mistake": word_groups(
            layer(3, finding(3)), layer(4, finding(4, "o_proj_zero")), layer(5, finding(5))
        ),
        "layers of a wrong shape alone": word_groups(*of_shape),
        "fitted parameters may differ a little": word_groups(*by_factor),
        "other parameters may not differ": word_groups(*by_tensor),
        "a mistake that comes second in another layer": word_groups(
            layer(0, query, key), layer(1, replace(key, layer=1), replace(query, layer=1))
        ),
        "layers that nothing explains are apart": word_groups(
            layer(0, finding(0)), layer(1, nearest=(finding(1),)), layer(2, site="k_norm"), layer(3)
        ),
        "no layer is lost": word_groups(*(layer(n, finding(n, f"mistake_{n % 3}")) for n in range(9))),
    }
    unequal = [
        layer(
            number,
            finding(number, SCALED, factor=factor),
            finding(number, "router_weights_scaled", factor=factor),
            finding(number),
        )
        for number, factor in enumerate((1.1, 1.5))
    ]
    scaled = finding(0, SCALED, factor=1.1)
    many = [layer(0, finding(0)), layer(1, finding(1)), layer(2), layer(3)]
    passed = (PassedOver(layers=(4, 5), like=(2, 3)),)
    names = {
        "a factor that differs by layer is taken back": word_layers(withdraw_unequal(unequal)),
        "a name of fewer layers than nothing explains": rare(layer(0, finding(0)), layer(1)),
        "a name of as many layers": rare(layer(0, finding(0)), layer(2, finding(2)), layer(1)),
        # Elsewhere, something else may be wrong.
        "a name of other sites": rare(layer(0, finding(0)), layer(1, site="attn_context")),
        # A mistake without a number that nearly explains another layer.
        "a name that comes near elsewhere": rare(
            layer(0, finding(0, MISSING)), layer(1, nearest=(finding(1, MISSING),))
        ),
        "a number that comes near elsewhere": rare(
            layer(0, scaled), layer(1, nearest=(replace(scaled, layer=1),))
        ),
        "layers that were passed over count": rare(*many, passed=passed),
        "three names of seven layers": rare(*many, layer(6, finding(6)), passed=passed),
        "three names of five layers": rare(*many, layer(6, finding(6))),
    }
    one = score(FIRST.with_parameters({"theta": 2.0}))
    alike = (one, score(SECOND.with_parameters({})), score(SECOND.with_parameters({})), one)
    pair = FIRST.with_parameters({"theta": 2.0}).and_also(SECOND.with_parameters({"scale": 3}))
    together = score(pair, explains=-0.5, is_decode_only=True)
    scores = {
        "a finding of one score": word_finding(MistakeFinding.of(3, one, spec=SPEC, alike=alike)),
        "a finding of two mistakes together": word_finding(MistakeFinding.of(None, together, spec=SPEC)),
    }
    expect_text("findings.txt", {**scores, **groups, **names})


def test_name_that_is_taken_back_is_still_near() -> None:
    named, other = layer(0, finding(0)), layer(1)
    first, second = withdraw_rare([named, other], ())
    assert (first.nearest, second) == (named.named, other)

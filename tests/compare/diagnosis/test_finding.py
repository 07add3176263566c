"""Findings: what a score becomes, and when a layer, a site and a whole diagnosis are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from compare.catalogue.mistake import Hypothesis, Mistake
from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, SiteDiagnosis
from compare.diagnosis.score import Score
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.reference.evaluation import replace_stage
from minimax_tools.results.results import Blame, Verdict

SPEC: Any = "spec"


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
    detail=lambda spec, parameters: f"{spec} {parameters['theta']}",
)
SECOND = mistake("gate_up_swapped", Site.MOE_DELTA)


def score(hypothesis: Hypothesis, *, explains: float = 0.5, is_decode_only: bool = False) -> Score:
    return Score(
        hypothesis=hypothesis,
        is_decode_only=is_decode_only,
        leaves=1.1,
        unexplained=9.0,
        misfit=1.2,
        explains=explains,
        amplitude=0.9,
        z=7.0,
        likeness=0.8,
    )


class TestMistake:
    def test_finding_of_one(self) -> None:
        one = score(FIRST.with_parameters({"theta": 2.0}))
        alike = (one, score(SECOND.with_parameters({})), score(SECOND.with_parameters({})), one)
        found = MistakeFinding.of(3, one, spec=SPEC, alike=alike)
        assert (found.layer, found.mistake, dict(found.parameters)) == (3, "rope_theta", {"theta": 2.0})
        assert (found.explains, found.leaves, found.amplitude, found.z) == (0.5, 1.1, 0.9, 7.0)
        assert found.what == "The base of the frequencies is another one than rope_theta. spec 2.0"
        assert found.look_at == "the default of rope_theta"
        assert (found.begins_at, found.sources) == ((("q_rope", "k_rope"),), ("SpecForge#265",))
        assert (found.resembles, found.proof) == (("gate_up_swapped",), None)

    def test_finding_of_two_together(self) -> None:
        pair = FIRST.with_parameters({"theta": 2.0}).and_also(SECOND.with_parameters({"scale": 3}))
        found = MistakeFinding.of(None, score(pair, explains=-0.5, is_decode_only=True), spec=SPEC)
        assert (found.layer, found.mistake) == (None, "rope_theta + gate_up_swapped")
        assert dict(found.parameters) == {
            "rope_theta.theta": 2.0,
            "gate_up_swapped.scale": 3,
            "rows": "decode",
        }
        assert "spec 2.0 Gate and up are exchanged" in found.what
        assert found.look_at == "the default of rope_theta; the order of w1 and w3 in the fused weight"
        assert found.begins_at == (("q_rope", "k_rope"), ("moe_delta",))
        assert (found.sources, found.resembles, found.explains) == (
            ("SpecForge#265", "sglang#32430", "Megatron-LM#6045"),
            (),
            0.0,
        )

    def test_hypothesis_of_attention_begins_before_the_experts(self) -> None:
        first, second = FIRST.with_parameters({"theta": 2.0}), SECOND.with_parameters({})
        assert (first.is_of_attention, second.is_of_attention) == (True, False)
        assert first.and_also(second).is_of_attention
        assert not mistake("norm", Site.POST_NORM).with_parameters({}).is_of_attention
        assert mistake("residual", Site.ATTN_RESIDUAL).with_parameters({}).is_of_attention

    def test_two_together_are_no_rounding(self) -> None:
        rounding = mistake("rounding", Site.Q_PROJ, is_rounding=True).with_parameters({})
        assert rounding.is_rounding
        assert not SECOND.with_parameters({}).is_rounding
        assert not rounding.and_also(SECOND.with_parameters({})).is_rounding
        assert not Hypothesis(mistakes=(), parameters=(), change=rounding.change).is_rounding


FINDING = MistakeFinding.of(1, score(SECOND.with_parameters({})), spec=SPEC)


class TestRight:
    @pytest.mark.parametrize(
        ("unexplained", "is_blamed", "is_named", "is_right"),
        [
            (2.0, False, False, True),
            (2.1, False, False, False),
            (1.0, True, False, False),
            (1.0, False, True, False),
        ],
    )
    def test_layer(self, unexplained: float, is_blamed: bool, is_named: bool, is_right: bool) -> None:
        layer = LayerDiagnosis(
            layer=1,
            sites=(Site.OUTPUT,),
            unexplained=unexplained,
            is_blamed=is_blamed,
            named=(FINDING,) if is_named else (),
        )
        assert layer.is_right is is_right

    @pytest.mark.parametrize(
        ("unexplained", "is_blamed", "is_named", "is_right"),
        [
            (2.0, True, False, True),
            (2.1, True, False, False),
            # A right port may sum in BF16: a site that is not blamed may be off by more.
            (10.0, False, False, True),
            (10.1, False, False, False),
            (1.0, False, True, False),
        ],
    )
    def test_site(self, unexplained: float, is_blamed: bool, is_named: bool, is_right: bool) -> None:
        site = SiteDiagnosis(
            site=ModelSite.LOGITS,
            unexplained=unexplained,
            is_blamed=is_blamed,
            named=(FINDING,) if is_named else (),
        )
        assert site.is_right is is_right

    def test_parts_count_as_blamed_and_not_of_shape_unless_told(self) -> None:
        layer = LayerDiagnosis(layer=1, sites=(), unexplained=1.0)
        assert (layer.is_blamed, layer.is_of_shape, layer.num_hypotheses) == (True, False, 0)

    def test_layers_are_alike_by_the_sites_of_their_blame(self) -> None:
        blame = (
            Blame(layer=1, sites=("q_proj", "q_norm"), reason=""),
            Blame(layer=1, sites=("output",), reason=""),
        )
        layer = LayerDiagnosis(layer=1, sites=(), unexplained=1.0, blame=blame)
        assert layer.place == (("q_proj", "q_norm"), ("output",))


class TestDiagnosis:
    @staticmethod
    def of(
        *,
        is_failed: bool = False,
        layers: tuple[LayerDiagnosis, ...] = (),
        sites: tuple[SiteDiagnosis, ...] = (),
    ) -> Diagnosis:
        return Diagnosis(reference="golden", target="run", is_failed=is_failed, layers=layers, sites=sites)

    def test_findings_are_in_the_models_order(self) -> None:
        def named(name: str) -> tuple[MistakeFinding, ...]:
            return (replace(FINDING, mistake=name),)

        sites = tuple(
            SiteDiagnosis(site=site, unexplained=9.0, named=named(str(site)))
            for site in (ModelSite.FINAL_NORM, ModelSite.LOGITS, ModelSite.EMBEDDING)
        )
        layers = (LayerDiagnosis(layer=1, sites=(), unexplained=9.0, named=named("layer")),)
        found = self.of(layers=layers, sites=sites)
        assert [finding.mistake for finding in found.findings] == [
            "embedding",
            "layer",
            "final_norm",
            "logits",
        ]

    def test_verdict(self) -> None:
        right = LayerDiagnosis(layer=1, sites=(), unexplained=1.0, is_blamed=False)
        wrong = SiteDiagnosis(site=ModelSite.LOGITS, unexplained=99.0)
        for found, verdict in (
            (self.of(layers=(right,)), Verdict.PASS),
            (self.of(is_failed=True), Verdict.FAIL),
            (self.of(sites=(wrong,)), Verdict.FAIL),
            (self.of(layers=(replace(right, named=(FINDING,)),)), Verdict.FAIL),
        ):
            assert (found.verdict, found.exit_code) == (verdict, verdict.exit_code)

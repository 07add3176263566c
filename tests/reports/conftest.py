"""Comparisons that no capture was needed for: one of each kind that a report must tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from minimax_tools.metrics.pair_metrics import PairMetrics
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import (
    Blame,
    Comparison,
    Curve,
    CurvePoint,
    NoiseRatio,
    RoutingResult,
    SiteResult,
    SiteStatus,
    Verdict,
)
from reports.page.evidence import DiagnosedPlace, DiagnosedRun, TriedMistake


def noise(whole: float, *, is_estimated: bool = False) -> NoiseRatio:
    return NoiseRatio(
        whole=whole,
        ordinary=whole * 0.98,
        massive=None,
        token_median=whole * 0.9,
        token_p99=whole * 1.4,
        token_worst=whole * 1.9,
        worst_token=(0, 17),
        is_estimated=is_estimated,
        incoming=0.0,
        floor=0.004,
    )


def metrics(max_abs_diff: float, *, cosine: float | None = 0.999991, nonfinite: int = 0) -> PairMetrics:
    return PairMetrics(
        num_elements=12288,
        num_nonfinite_reference=0,
        num_nonfinite_target=nonfinite,
        max_abs_diff=max_abs_diff,
        mean_abs_diff=max_abs_diff / 8,
        median_abs_diff=max_abs_diff / 10,
        close_fraction=1 - max_abs_diff,
        cosine_similarity=cosine,
        pearson_correlation=cosine,
        relative_l2=max_abs_diff,
        norm_ratio=1 - max_abs_diff,
        worst_index=(0, 17, 2044),
    )


def routing(num_flipped: int) -> RoutingResult:
    return RoutingResult(
        num_tokens=157, num_flipped=num_flipped, num_explained=num_flipped, widest_unexplained_margin=None
    )


def passing_site(layer: int | None, site: str) -> SiteResult:
    """A plain pass whose figures differ from layer to layer and from site to site."""
    plain = SiteResult(layer=layer, site=site, status=SiteStatus.PASS)
    if site == Site.ROUTER_EXPERTS:
        return replace(plain, routing=routing(0))
    number = (layer or 0) + len(site)
    return replace(plain, metrics=metrics(0.001 * number), noise=noise(0.9 + 0.01 * number))


def failing_site(layer: int | None, site: str, rho: float, **fields: Any) -> SiteResult:
    plain: dict[str, Any] = {
        "reason": f"rho {rho} is above 1.6",
        "metrics": metrics(0.0312, cosine=0.9973),
        "noise": noise(rho),
    }
    return SiteResult(layer=layer, site=site, status=SiteStatus.FAIL, **(plain | fields))


def compare_sites(
    verdict: Verdict, *changed: SiteResult, layers: int = 8, model: bool = False, **fields: Any
) -> Comparison:
    """A comparison in which every site passes but those that are given."""
    places: list[tuple[int | None, str]] = [
        (layer, str(site)) for layer in range(layers) for site in ModelGraph().sites if site is not Site.INPUT
    ]
    places += [(None, str(site)) for site in ModelSite] if model else []
    given = {(site.layer, site.site): site for site in changed}
    return Comparison(
        reference="mm2-captures/gpu_reference/full_model",
        target="mm2-captures/neuron/sweep_0_to_7",
        criteria="noise",
        verdict=verdict,
        sites=tuple(given.get(place) or passing_site(*place) for place in places),
        **fields,
    )


@pytest.fixture(scope="session")
def passing() -> Comparison:
    return compare_sites(Verdict.PASS, model=True)


@pytest.fixture(scope="session")
def failing() -> Comparison:
    """moe_delta of layer 5 is to blame, and its output suffers from it."""
    reason = "rho 14.2 is above 1.6, and post_norm, router_experts and router_weights pass"
    return compare_sites(
        Verdict.FAIL,
        failing_site(5, "moe_delta", 14.2, classic_failures=("cosine_similarity 0.93 < 0.99",)),
        failing_site(5, "output", 3.1),
        blame=(Blame(layer=5, sites=("moe_delta",), reason=reason),),
        notes=("Run the part alone: mm2-test component --layer 5 --component moe",),
    )


@pytest.fixture(scope="session")
def warning() -> Comparison:
    flipped = SiteResult(
        layer=3,
        site="router_experts",
        status=SiteStatus.WARN,
        reason="2 flips are within the noise [0.0013]",
        routing=routing(2),
    )
    estimated = SiteResult(
        layer=3,
        site="moe_delta",
        status=SiteStatus.WARN,
        reason="rho 1.5 is near the limit of 1.6",
        metrics=metrics(0.01),
        noise=noise(1.5, is_estimated=True),
        num_set_aside=2,
    )
    return compare_sites(Verdict.WARN, flipped, estimated)


@pytest.fixture(scope="session")
def nonfinite() -> Comparison:
    """A NaN in attn_context of layer 2; what follows is NaN too, and one site has another shape."""
    first = failing_site(
        2,
        "attn_context",
        float("nan"),
        reason="64 NaN on real tokens, the first at 0,17,0",
        metrics=metrics(0.5, cosine=None, nonfinite=64),
        classic_failures=("64 elements are not finite",),
    )
    second = failing_site(
        2,
        "attn_delta",
        float("inf"),
        reason="3072 NaN on real tokens",
        metrics=metrics(0.5, nonfinite=3072),
        classic_failures=("3072 elements are not finite",),
    )
    other_shape = SiteResult(
        layer=2,
        site="attn_residual",
        status=SiteStatus.FAIL,
        reason="shape [1, 96, 1536], expected [1, 96, 3072]",
    )
    blame = (Blame(layer=2, sites=("attn_context",), reason="the earliest site with a NaN on a real token"),)
    return compare_sites(Verdict.FAIL, first, second, other_shape, layers=3, blame=blame)


@pytest.fixture(scope="session")
def unexposed() -> Comparison:
    """A port that hides q_rope and k_rope, against a golden without router_logits in layers 0 to 3."""
    hidden = [
        SiteResult(layer=layer, site=site, status=SiteStatus.NOT_EXPOSED)
        for layer in range(8)
        for site in ("q_rope", "k_rope")
    ]
    status, reason = SiteStatus.NOT_CAPTURED, "made with --sites layer"
    absent = [
        SiteResult(layer=layer, site="router_logits", status=status, reason=reason) for layer in range(4)
    ]
    return compare_sites(Verdict.PASS, *hidden, *absent)


@pytest.fixture(scope="session")
def classic(failing: Comparison) -> Comparison:
    """The failing comparison without a noise floor, judged by the seeds' limits."""
    sites = tuple(replace(site, noise=None) for site in failing.sites)
    return replace(failing, criteria="classic", sites=sites, notes=())


@pytest.fixture(scope="session")
def chained() -> Comparison:
    """A chained run of 30 layers that goes wrong in layer 5 and stays wrong; nobody is blamed."""
    changed = [
        failing_site(layer, str(site), 2.0 + layer + order / 10)
        for layer in range(5, 30)
        for order, site in enumerate(ModelGraph().sites)
        if site not in (Site.INPUT, Site.ROUTER_EXPERTS) and (layer > 5 or site.order >= Site.MOE_DELTA.order)
    ]
    points = tuple(
        CurvePoint(layer=layer, error=0.001 * (layer + 1), handed_on=0.001 * layer, floor=0.002, ratio=0.9)
        for layer in range(30)
    )
    note = (
        "A chained run does not tell whose fault it is. Judge each layer alone: mm2-test sweep --layers 0:30"
    )
    curve = Curve(points=points, onset=20, command="mm2-test single-layer")
    return compare_sites(Verdict.FAIL, *changed, layers=30, notes=(note,), curve=curve)


def tried(name: str, *, leaves: str, is_named: bool, **fields: Any) -> TriedMistake:
    texts = {
        "parameters": "",
        "explains": "99",
        "what": "Gate and up are exchanged.",
        "look_at": "the weight",
    }
    return TriedMistake(name=name, leaves=leaves, is_named=is_named, **(texts | fields))


@pytest.fixture(scope="session")
def diagnose() -> Callable[..., DiagnosedRun]:
    """Makes the diagnosis of a layer that one mistake explains, and another in this layer alone."""

    def make(name: str = "gate_up_swapped") -> DiagnosedRun:
        place = DiagnosedPlace(
            place="layer 5",
            outcome=f"matches {name}: leaves ρ 0.970 of 112",
            is_right=False,
            mistakes=(
                tried(name, leaves="0.970", is_named=True),
                tried("up_gate_halves", leaves="1.10", is_named=True, layers="in layer 5"),
                tried("act_missing", leaves="88.0", is_named=False),
            ),
            method="111 hypotheses tried, judged by output",
        )
        headline = f"FAIL: layer 5, {name}"
        return DiagnosedRun(headline=headline, places=(place,), notes=("Mend the port first.",))

    return make


@pytest.fixture(scope="session")
def undiagnosed() -> DiagnosedRun:
    """The diagnosis of layers that no known mistake explains."""
    place = DiagnosedPlace(
        place="layers 0-1",
        outcome="no known mistake explains them (ρ 384 … 388)",
        is_right=False,
        lies=("Lies between k_proj (right) and k_norm (wrong).", "4 more show the same pattern: layers 2-5."),
        mistakes=(tried("norm_eps", leaves="377", is_named=False),),
    )
    return DiagnosedRun(headline="FAIL: layers 0-5, k_norm: no known mistake explains it", places=(place,))

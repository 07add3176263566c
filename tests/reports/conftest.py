from __future__ import annotations

from collections.abc import Mapping

import pytest

from minimax_tools.metrics.pair_metrics import PairMetrics
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import (
    Blame,
    Comparison,
    NoiseRatio,
    RoutingResult,
    SiteResult,
    SiteStatus,
    Verdict,
)

GOLDEN = "mm2-captures/gpu_reference/full_model"
DEVICE = "mm2-captures/neuron/sweep_0_to_7"


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


def passing_site(layer: int | None, site: str) -> SiteResult:
    """A plain pass whose figures differ from layer to layer and from site to site."""
    number = (layer or 0) + len(site)
    if site == Site.ROUTER_EXPERTS:
        routing = RoutingResult(
            num_tokens=157, num_flipped=0, num_explained=0, widest_unexplained_margin=None
        )
        return SiteResult(layer=layer, site=site, status=SiteStatus.PASS, routing=routing)
    return SiteResult(
        layer=layer,
        site=site,
        status=SiteStatus.PASS,
        metrics=metrics(0.001 * number),
        noise=noise(0.9 + 0.01 * number),
    )


def compare_sites(
    verdict: Verdict,
    *,
    layers: int = 8,
    changed: Mapping[tuple[int | None, str], SiteResult] | None = None,
    model: bool = False,
    criteria: str = "noise",
    blame: tuple[Blame, ...] = (),
    notes: tuple[str, ...] = (),
) -> Comparison:
    """A comparison in which every site passes but those of `changed`."""
    places: list[tuple[int | None, str]] = [
        (layer, str(site)) for layer in range(layers) for site in Site if site is not Site.INPUT
    ]
    places += [(None, str(site)) for site in ModelSite] if model else []
    return Comparison(
        reference=GOLDEN,
        target=DEVICE,
        criteria=criteria,
        verdict=verdict,
        sites=tuple((changed or {}).get(place) or passing_site(*place) for place in places),
        blame=blame,
        notes=notes,
    )


def failing_site(layer: int | None, site: str, rho: float, *, classic: tuple[str, ...] = ()) -> SiteResult:
    return SiteResult(
        layer=layer,
        site=site,
        status=SiteStatus.FAIL,
        reason=f"rho {rho} is above 1.6",
        metrics=metrics(0.0312, cosine=0.9973),
        noise=noise(rho),
        classic_failures=classic,
    )


@pytest.fixture(scope="session")
def passing() -> Comparison:
    return compare_sites(Verdict.PASS, model=True)


@pytest.fixture(scope="session")
def failing() -> Comparison:
    """moe_delta of layer 5 is to blame, and its output suffers from it."""
    return compare_sites(
        Verdict.FAIL,
        changed={
            (5, "moe_delta"): failing_site(5, "moe_delta", 14.2, classic=("cosine_similarity 0.93 < 0.99",)),
            (5, "output"): failing_site(5, "output", 3.1),
        },
        blame=(
            Blame(
                layer=5,
                sites=("moe_delta",),
                reason="rho 14.2 is above 1.6, and post_norm, router_experts and router_weights pass",
            ),
        ),
        notes=("Run the part alone: mm2-test component --layer 5 --component moe",),
    )


@pytest.fixture(scope="session")
def warning() -> Comparison:
    flipped = SiteResult(
        layer=3,
        site="router_experts",
        status=SiteStatus.WARN,
        reason="2 flips are within the noise [0.0013]",
        routing=RoutingResult(num_tokens=157, num_flipped=2, num_explained=2, widest_unexplained_margin=None),
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
    return compare_sites(Verdict.WARN, changed={(3, "router_experts"): flipped, (3, "moe_delta"): estimated})


@pytest.fixture(scope="session")
def nonfinite() -> Comparison:
    """A NaN in attn_context of layer 2; what follows is NaN too, and one site has another shape."""
    sites = {
        (2, "attn_context"): SiteResult(
            layer=2,
            site="attn_context",
            status=SiteStatus.FAIL,
            reason="64 NaN on real tokens, the first at 0,17,0",
            metrics=metrics(0.5, cosine=None, nonfinite=64),
            noise=noise(float("nan")),
            classic_failures=("64 elements are not finite",),
        ),
        (2, "attn_delta"): SiteResult(
            layer=2,
            site="attn_delta",
            status=SiteStatus.FAIL,
            reason="3072 NaN on real tokens",
            metrics=metrics(0.5, nonfinite=3072),
            noise=noise(float("inf")),
            classic_failures=("3072 elements are not finite",),
        ),
        (2, "attn_residual"): SiteResult(
            layer=2,
            site="attn_residual",
            status=SiteStatus.FAIL,
            reason="shape [1, 96, 1536], expected [1, 96, 3072]",
        ),
    }
    blame = (Blame(layer=2, sites=("attn_context",), reason="the earliest site with a NaN on a real token"),)
    return compare_sites(Verdict.FAIL, layers=3, changed=sites, blame=blame)


@pytest.fixture(scope="session")
def unexposed() -> Comparison:
    """A port that hides q_rope and k_rope, against a golden without router_logits in layers 0 to 3."""
    hidden = {
        (layer, site): SiteResult(layer=layer, site=site, status=SiteStatus.NOT_EXPOSED)
        for layer in range(8)
        for site in ("q_rope", "k_rope")
    }
    absent = {
        (layer, "router_logits"): SiteResult(
            layer=layer,
            site="router_logits",
            status=SiteStatus.NOT_CAPTURED,
            reason="made with --sites layer",
        )
        for layer in range(4)
    }
    return compare_sites(Verdict.PASS, changed={**hidden, **absent})


@pytest.fixture(scope="session")
def classic(failing: Comparison) -> Comparison:
    """The failing comparison without a noise floor, judged by the seeds' limits."""
    return Comparison(
        reference=failing.reference,
        target=failing.target,
        criteria="classic",
        verdict=failing.verdict,
        sites=tuple(
            SiteResult(
                layer=site.layer,
                site=site.site,
                status=site.status,
                reason=site.reason,
                metrics=site.metrics,
                routing=site.routing,
                classic_failures=site.classic_failures,
            )
            for site in failing.sites
        ),
        blame=failing.blame,
    )


@pytest.fixture(scope="session")
def chained() -> Comparison:
    """A chained run of 62 layers that goes wrong in layer 5 and stays wrong; nobody is blamed."""
    changed = {
        (layer, str(site)): failing_site(layer, str(site), 2.0 + layer + site.order / 10)
        for layer in range(5, 62)
        for site in Site
        if site not in (Site.INPUT, Site.ROUTER_EXPERTS) and (layer > 5 or site.order >= Site.MOE_DELTA.order)
    }
    notes = (
        "A chained run does not tell whose fault it is. Judge each layer alone: mm2-test sweep --layers 0:62",
    )
    return compare_sites(Verdict.FAIL, layers=62, changed=changed, notes=notes)

"""A golden's stored floor: refused where it does not agree with the golden, and widened by its variants."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from damage.tampering import change_tensor, sign

from compare.chains.chain_judge import ChainJudge
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CaptureError
from minimax_tools.metrics.noise_floor import ROUTER_NOISE, variant_name
from minimax_tools.model.run import multi_layer_run, single_layer_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus, Verdict

Judge = Callable[..., Comparison]
FLOOR = "layer_1.floor.safetensors"
LAYER, SITE = 1, Site.ATTN_DELTA
Q_PROJ = ["q_proj.error", "q_proj.error_ordinary", "q_proj.error_massive"]
# Both sides hold the layer that is looked at, and no other.
RUN = single_layer_run(1, sites_level="all")
GOLDEN = multi_layer_run(Span.single(1), sites_level="all")


def tampered(golden: Path, file: str, name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    change_tensor(golden, file, name, how)
    sign(golden, with_statistics=True)
    return golden


def test_golden_that_agrees_with_itself_is_taken(copyist: Any, judge: Judge) -> None:
    run = copyist.device_run(run=RUN)
    for noise_floor in ("full", "stats", "off"):
        golden = copyist.golden(run=GOLDEN, noise_floor=noise_floor, name=noise_floor)
        assert judge(run, reference=golden).verdict is Verdict.PASS


@pytest.mark.parametrize("noise_floor", ["full", "stats"])
def test_variant_whose_parts_do_not_add_up_is_refused(copyist: Any, judge: Judge, noise_floor: str) -> None:
    golden = copyist.golden(run=GOLDEN, noise_floor=noise_floor, describe=named("eager"))
    add_variants(golden, {"eager": 1.0})
    run = copyist.device_run(run=RUN)
    assert judge(run, reference=golden).verdict is Verdict.PASS
    tampered(golden, FLOOR, "eager/moe_delta.error_ordinary", lambda error: error * 1000)
    words = r"of variant eager do not add up to moe_delta\.error at moe_delta"
    with pytest.raises(CaptureError, match=words):
        judge(run, reference=golden)


@pytest.mark.parametrize(
    ("file", "names", "how", "words"),
    [
        (FLOOR, Q_PROJ, torch.zeros_like, "says that BF16 cost nothing at q_proj of layer 1"),
        (FLOOR, ["router_noise"], torch.zeros_like, "another noise on the router's scores of layer 1"),
        (
            FLOOR,
            ["router_noise"],
            lambda noise: 1000 * noise,
            "another noise on the router's scores of layer",
        ),
        (
            "layer_1.safetensors",
            ["router_experts"],
            lambda experts: (experts + 1) % 32,
            "router_experts of layer 1 .* do not follow from its logits",
        ),
    ],
)
def test_golden_that_disagrees_with_itself_is_refused(
    copyist: Any, judge: Judge, file: str, names: list[str], how: Any, words: str
) -> None:
    golden = copyist.golden(run=GOLDEN, noise_floor="stats" if names is Q_PROJ else "full")
    for name in names:
        tampered(golden, file, name, how)
    with pytest.raises(CaptureError, match=words):
        judge(copyist.device_run(run=RUN), reference=golden)


def test_chain_is_not_judged_by_a_floor_that_is_not_the_goldens(copyist: Any) -> None:
    golden = copyist.golden()
    output = Capture.open(golden).read(2, Site.OUTPUT).clone()
    for part in ("error", "error_ordinary", "error_massive"):
        tampered(golden, FLOOR, f"output.{part}", lambda error: error * 1000)
    criteria = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
    with pytest.raises(CaptureError, match=r"output of layer 1 and its float32 twin are not as far apart"):
        ChainJudge(Capture.open(golden), criteria=criteria).judge(Span(1, 3), output)


# Goldens whose floor is widened by other right ways to compute a layer.


def named(*variants: str) -> Callable[[Description], Description]:
    return lambda description: replace(description, floor_variants=variants)


def add_variants(golden: Path, factors: Mapping[str, float], *, noise: float = 1.0) -> Path:
    """Give a golden variants that stray so many times as far as itself, at every site of every layer."""
    for path in golden.glob("layer_*.floor.safetensors"):
        own = load_file(path)
        for variant, factor in factors.items():
            own |= {
                variant_name(variant, name): tensor * (noise if name == ROUTER_NOISE else factor)
                for name, tensor in own.items()
                if "/" not in name
            }
        save_file(own, path)
    sign(golden)
    return golden


def stray(copyist: Any, times: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A right port's tensor whose error is so many times the golden's."""
    twin = copyist.source.read_twin(LAYER, SITE)
    return lambda tensor: (twin + times * (tensor.float() - twin)).to(tensor.dtype)


def site_of(comparison: Comparison, site: Site = SITE) -> SiteResult:
    (found,) = [one for one in comparison.of_layer(LAYER) if one.site == site]
    return found


@pytest.mark.parametrize("noise_floor", ["full", "stats"])
def test_port_is_held_against_the_furthest_variant(copyist: Any, judge: Judge, noise_floor: str) -> None:
    port = copyist.device_run({(LAYER, SITE): stray(copyist, 4.0)}, run=RUN)
    plain = copyist.golden(run=GOLDEN, noise_floor=noise_floor, name="plain")
    varied = copyist.golden(run=GOLDEN, noise_floor=noise_floor, describe=named("eager", "halves"))
    add_variants(varied, {"eager": 4.0, "halves": 0.5})
    without, with_variants = judge(port, reference=plain), judge(port, reference=varied)
    assert site_of(without).status is SiteStatus.FAIL
    found = site_of(with_variants)
    assert found.noise is not None
    # Where the twin is not kept, the error is known from the port's distance to the golden alone.
    assert found.noise.whole == pytest.approx(
        1.0 if noise_floor == "full" else ((4.0 - 1.0) ** 2 - 1.0) ** 0.5 / 4.0, rel=0.02
    )
    assert found.status is SiteStatus.PASS


def test_larger_errors_and_wrong_scales_are_found_all_the_same(copyist: Any, judge: Judge) -> None:
    port = copyist.device_run({(LAYER, SITE): stray(copyist, 6.0)}, run=RUN)
    varied = add_variants(copyist.golden(run=GOLDEN, describe=named("eager")), {"eager": 3.0})
    comparison = judge(port, reference=varied)
    assert comparison.verdict is Verdict.FAIL
    assert [(blame.layer, blame.sites) for blame in comparison.blame] == [(LAYER, (str(SITE),))]
    # A scale that is off by less than the noise.
    changes = {(LAYER, SITE): lambda tensor: (tensor.float() * 1.01).to(tensor.dtype)}
    scaled = copyist.device_run(changes, run=RUN, name="scaled")
    near = copyist.golden(run=GOLDEN, describe=named("eager"), name="near")
    assert site_of(judge(scaled, reference=add_variants(near, {"eager": 1.2}))).status is SiteStatus.FAIL


def test_variants_that_stray_less_change_no_figure(copyist: Any, judge: Judge) -> None:
    port = copyist.device_run({(LAYER, SITE): stray(copyist, 1.2)}, run=RUN)
    varied = add_variants(copyist.golden(run=GOLDEN, describe=named("eager")), {"eager": 0.9})
    plain = copyist.golden(run=GOLDEN, describe=named(), name="plain")
    mine, theirs = (site_of(judge(port, reference=golden)).noise for golden in (varied, plain))
    assert mine is not None
    for figure in ("whole", "ordinary", "token_median", "token_worst", "token_gain"):
        assert getattr(mine, figure) == pytest.approx(getattr(theirs, figure), rel=1e-5)


def test_flips_are_explained_by_the_noise_of_variants_too(copyist: Any, judge: Judge) -> None:
    experts = copyist.source.read(LAYER, Site.ROUTER_EXPERTS)

    def flip(tensor: torch.Tensor) -> torch.Tensor:
        free = next(number for number in range(32) if number not in experts[0, 3].tolist())
        tensor[0, 3, 0] = free
        return tensor

    port = copyist.device_run({(LAYER, Site.ROUTER_EXPERTS): flip}, run=RUN)
    for name, noise, status in (("quiet", 1.0, SiteStatus.FAIL), ("loud", 1e6, SiteStatus.PASS)):
        golden = copyist.golden(run=GOLDEN, describe=named("eager"), name=name)
        comparison = judge(port, reference=add_variants(golden, {"eager": 1.0}, noise=noise))
        assert site_of(comparison, Site.ROUTER_EXPERTS).status is status


def test_report_tells_of_a_golden_without_variants(copyist: Any, judge: Judge) -> None:
    port = copyist.device_run(run=RUN)
    varied = copyist.golden(run=GOLDEN, describe=named("eager", "halves"))
    notes = " ".join(judge(port, reference=add_variants(varied, {"eager": 1.1, "halves": 1.0})).notes)
    assert "more coarsely" not in notes
    plain = copyist.golden(run=GOLDEN, describe=named(), name="plain")
    assert "measured no other right roundings" in " ".join(judge(port, reference=plain).notes)


def test_variant_that_the_manifest_names_and_no_file_holds_is_damage(copyist: Any, judge: Judge) -> None:
    varied = copyist.golden(run=GOLDEN, describe=named("eager"))
    with pytest.raises(CaptureError, match="of variant eager of layer 1"):
        judge(copyist.device_run(run=RUN), reference=varied)

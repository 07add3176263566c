"""Two blamed sites of one operation, wrong alike, are one cause; on made-up results, and on ports that really run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.blame.blame import group_blame
from compare.blame.operations import join_alike, join_findings
from compare.cli import main as mm2_compare
from compare.comparer import judge_run
from compare.diagnosis.diagnose import diagnose_run
from compare.diagnosis.finding import confirm_causes
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site
from minimax_tools.results.results import (
    Blame,
    Comparison,
    ModelFinding,
    NearestLimit,
    NoiseRatio,
    RelativeError,
    SiteResult,
    SiteStatus,
    WrongRegion,
)

DIMS = WrongRegion(num_wrong=20, num_held=30, of=512, dims=((1, 30),))


def failing(layer: int, site: str, rho: float, *regions: WrongRegion) -> SiteResult:
    noise = NoiseRatio(
        whole=rho,
        ordinary=rho,
        massive=None,
        token_median=rho,
        token_p99=rho,
        token_worst=rho,
        worst_token=(0, 0),
        is_estimated=False,
        incoming=0.0,
    )
    return SiteResult(
        layer=layer,
        site=site,
        status=SiteStatus.FAIL,
        noise=noise,
        nearest=NearestLimit(figure="whole", value=rho, limit=1.3),
        where=("wrong channels",) if regions else (),
        regions=regions,
    )


def blame_of(*results: SiteResult) -> tuple[Blame, ...]:
    return tuple(
        Blame(layer=result.layer, sites=(result.site,), reason=f"{result.site} of layer {result.layer}")
        for result in results
    )


def word_causes(results: Sequence[SiteResult]) -> str:
    groups = group_blame(join_alike(blame_of(*results), results), results)
    return "\n".join(
        f"layers {', '.join(map(str, group.layers))}: {' and '.join(group.sites)} [{group.operation}]"
        for group in groups
    )


def both(
    rho: float, *regions: WrongRegion, of_keys: tuple[WrongRegion, ...] | None = None
) -> list[SiteResult]:
    """Queries that are off by 100 times the noise, and keys by `rho` times, after the rotation."""
    of_keys = regions if of_keys is None else of_keys
    return [failing(0, "q_rope", 100.0, *regions), failing(0, "k_rope", rho, *of_keys)]


def without_floor(site: str, value: float) -> SiteResult:
    return replace(failing(0, site, 90.0), noise=None, relative=RelativeError(value=value, incoming=0.0))


HERE = replace(DIMS, dims=())
NAN = [SiteResult(layer=0, site=site, status=SiteStatus.FAIL, reason="NaN") for site in ("q_norm", "k_norm")]


def test_sites_that_are_wrong_alike_are_one_cause(expect_text: Callable[..., None]) -> None:
    of_keys = [{"dims": ((32, 63),)}, {"heads": (1,)}, {"dims": ((1, 30),), "rows": (0,)}, {}]
    first_row, second_row = (replace(HERE, rows=(row,)) for row in (0, 1))
    query_heads, key_heads = (replace(HERE, heads=heads) for heads in ((4, 5, 6, 7), (1,)))
    q_norm, k_norm = failing(0, "q_norm", 90.0), failing(0, "k_norm", 80.0)
    cases = {
        "two operations": [q_norm, failing(0, "k_rope", 90.0)],
        "projections": [failing(0, site, 90.0) for site in ("q_proj", "k_proj", "v_proj")],
        "two layers": [q_norm, failing(1, "k_norm", 90.0)],
        "a layer in which one site alone is to blame": [q_norm, k_norm, failing(1, "k_norm", 80.0)],
        **{f"{rho} times the noise beside 100": both(rho) for rho in (60.0, 70.0, 140.0, 160.0)},
        "nearly the same dims": both(90.0, DIMS, of_keys=(replace(DIMS, dims=((1, 29),)),)),
        **{
            f"dims 1-30 beside {keys}": both(90.0, DIMS, of_keys=(replace(HERE, **keys),)) for keys in of_keys
        },
        "the same row": both(90.0, first_row),
        "another row": both(90.0, first_row, of_keys=(second_row,)),
        "fewer heads of keys": both(90.0, query_heads, of_keys=(key_heads,)),
        "NaN in both": NAN,
        "NaN and a figure": [NAN[0], k_norm],
        "relative errors": [without_floor("q_norm", 0.3), without_floor("k_norm", 0.28)],
        "other relative errors": [without_floor("q_rope", 0.3), without_floor("k_rope", 0.1)],
    }
    expect_text("causes.txt", {title: word_causes(results) for title, results in cases.items()})


def test_one_cause_has_both_reasons() -> None:
    results = [
        failing(layer, site, rho, DIMS)
        for layer, rho in ((0, 100.0), (1, 150.0))
        for site in ("q_rope", "k_rope")
    ]
    (group,) = group_blame(join_alike(blame_of(*results), results), results)
    assert (group.layers, group.sites, group.worst_layer) == ((0, 1), ("q_rope", "k_rope"), 1)
    assert group.operation == "rotary embedding"
    assert group.reason == "q_rope: q_rope of layer 1; k_rope: k_rope of layer 1"
    assert group.where == ("q_rope: wrong channels", "k_rope: wrong channels")
    assert group.regions == (DIMS, DIMS)


def test_site_without_blame_or_behind_hidden_ones_is_joined_to_none() -> None:
    results = [failing(0, site, 90.0) for site in ("q_norm", "k_norm", "k_proj")]
    blamed = blame_of(results[0], results[2])
    assert [one.operation for one in join_alike(blamed, results)] == ["", ""]
    hidden = (
        Blame(layer=0, sites=("q_norm", "q_rope"), reason="q_rope"),
        Blame(layer=0, sites=("k_norm", "k_rope"), reason="k_rope"),
    )
    assert join_alike(hidden, both(100.0)) == hidden


def test_findings_of_one_pass_and_layer_share_their_operation() -> None:
    results = both(90.0)
    blame = join_alike(blame_of(*results), results)

    def finding(site: str, number: int, *, is_of_sites: bool = True) -> ModelFinding:
        return ModelFinding(number=number, layer=0, sites=(site,), reason=site, is_of_sites=is_of_sites)

    together = [finding("q_rope", 0), finding("k_rope", 0)]
    assert [one.operation for one in join_findings(together, blame)] == ["rotary embedding"] * 2
    for apart in (
        [finding("q_rope", 0), finding("k_rope", 1)],
        [finding("q_rope", 0)],
        [finding("q_rope", 0), finding("k_rope", 0, is_of_sites=False)],
    ):
        assert not any(one.operation for one in join_findings(apart, blame))


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


@pytest.mark.parametrize(
    ("factors", "sites"),
    [
        ({Site.Q_NORM: 0.8, Site.K_NORM: 0.8}, [("q_norm", "k_norm")]),
        ({Site.Q_NORM: 0.8, Site.K_NORM: 0.3}, [("q_norm",), ("k_norm",)]),
        ({Site.Q_NORM: 0.8, Site.K_ROPE: 0.8}, [("q_norm",), ("k_rope",)]),
    ],
)
def test_captures_whose_sites_are_scaled_alike_have_one_cause(
    copyist: Any,
    judge: Callable[..., Comparison],
    factors: dict[Site, float],
    sites: list[tuple[str, ...]],
) -> None:
    changes = {(layer, site): scaled(factor) for layer in (1, 2) for site, factor in factors.items()}
    groups = judge(copyist.device_run(changes), pattern="layer_[12]").blame_groups
    assert [(group.layers, group.sites) for group in groups] == [((1, 2), of) for of in sites]
    assert groups[0].reason.count("× the noise floor") == len(sites[0])


class TestPorts:
    @pytest.mark.slow
    def test_wrong_rotation_is_one_cause_in_every_report(
        self, run_port: Callable[..., Path], toy: Path, golden: Path, command: Any, tmp_path: Path
    ) -> None:
        paths = (
            "--golden",
            golden,
            "--run",
            run_port("sweep", "planted.py:InterleavedRotary", "--layers", "1:3"),
            "--model",
            toy,
        )
        text = command(mm2_compare, *paths, "--verbose", "--report-path", tmp_path).stdout
        assert text.startswith("FAIL: layers 1-2, q_rope and k_rope\n")
        blame = text.partition("To blame")[2].partition("Consequences")[0]
        assert blame.count("one cause, the rotary embedding") == 1
        assert "\n    q_rope: error " in blame
        assert "\n    k_rope: error " in blame
        assert "cause 2" not in text
        markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
        assert r"- layers 1-2, q\_rope and k\_rope: one cause, the rotary embedding" in markdown
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert page.count('<div class="blame">') == 1
        (title,) = re.findall('<div class="blame">\\s*<h3>(.*?)</h3>', page)
        assert re.sub("<.*?>", "", title) == "layers 1-2, q_rope and k_rope"
        record = command(mm2_compare, *paths, "--json=summary", "--quiet").stdout
        assert record.count('"operation": "rotary embedding"') == 6

    def test_one_named_mistake_joins_sites_that_are_not_wrong_alike(
        self, run_port: Callable[..., Path], toy: Path, golden: Path
    ) -> None:
        weights = CheckpointWeights(model=str(toy))
        run = judge_run(
            Capture.open(golden),
            Capture.open(run_port("sweep", "planted.py:NormPerRank", "--layers", "1:2")),
            criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
            layer_pattern="layer_*",
            weights=weights,
        )
        assert [group.sites for group in run.comparison.blame_groups] == [("q_norm",), ("k_norm",)]
        named = diagnose_run(run, weights=weights, mistakes=("qk_norm_per_rank",))
        (group,) = confirm_causes(run, named).blame_groups
        assert group.sites == ("q_norm", "k_norm")
        (first,) = named.layers
        assert first.named[0].begins_at == (("q_norm", "k_norm"),)
        # Of two mistakes, one must begin at both sites.
        for begins, num_causes in (
            ((("q_norm", "k_norm"), ("moe_delta",)), 1),
            ((("q_norm",), ("k_norm",)), 2),
        ):
            layers = tuple(
                replace(layer, named=(replace(layer.named[0], begins_at=begins),)) for layer in named.layers
            )
            confirmed = confirm_causes(run, replace(named, layers=layers))
            assert len(confirmed.blame_groups) == num_causes
        # What explains nothing confirms nothing.
        other = diagnose_run(run, weights=weights, mistakes=("gelu_activation",))
        assert confirm_causes(run, other) is run.comparison

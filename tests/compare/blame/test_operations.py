"""Two blamed sites of one operation, wrong alike, are one cause; on made-up results, and on ports that really run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
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
from neuron.cli import main as mm2_test

PORTS = Path(__file__).parents[2] / "ports"
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


def causes(*results: SiteResult) -> list[tuple[tuple[int | None, ...], tuple[str, ...], str]]:
    groups = group_blame(join_alike(blame_of(*results), results), results)
    return [(group.layers, group.sites, group.operation) for group in groups]


class TestMadeUpResults:
    def test_both_sites_of_an_operation_are_one_cause_with_both_reasons(self) -> None:
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

    def test_sites_of_two_operations_stay_two_causes(self) -> None:
        assert causes(failing(0, "q_norm", 90.0), failing(0, "k_rope", 90.0)) == [
            ((0,), ("q_norm",), ""),
            ((0,), ("k_rope",), ""),
        ]

    def test_projections_are_operations_of_their_own(self) -> None:
        found = causes(failing(0, "q_proj", 90.0), failing(0, "k_proj", 90.0), failing(0, "v_proj", 90.0))
        assert [sites for _, sites, _ in found] == [("q_proj",), ("k_proj",), ("v_proj",)]

    def test_layers_in_which_one_site_alone_is_to_blame_are_apart(self) -> None:
        found = causes(failing(0, "q_norm", 90.0), failing(0, "k_norm", 80.0), failing(1, "k_norm", 80.0))
        assert found == [((0,), ("q_norm", "k_norm"), "norm of queries and keys"), ((1,), ("k_norm",), "")]

    def test_site_that_fails_without_blame_is_joined_to_none(self) -> None:
        results = [failing(0, site, 90.0) for site in ("q_norm", "k_norm", "k_proj")]
        blamed = blame_of(results[0], results[2])
        assert [one.operation for one in join_alike(blamed, results)] == ["", ""]

    def test_sites_blamed_in_other_layers_stay_two_causes(self) -> None:
        assert len(causes(failing(0, "q_norm", 90.0), failing(1, "k_norm", 90.0))) == 2

    @pytest.mark.parametrize(("rho", "num_causes"), [(140.0, 1), (70.0, 1), (160.0, 2), (60.0, 2)])
    def test_errors_must_be_about_as_large(self, rho: float, num_causes: int) -> None:
        assert len(causes(failing(0, "q_norm", 100.0), failing(0, "k_norm", rho))) == num_causes

    @pytest.mark.parametrize(
        ("regions", "num_causes"),
        [
            ({"dims": ((1, 29),)}, 1),
            ({"dims": ((32, 63),)}, 2),
            ({"heads": (1,)}, 2),
            ({"dims": ((1, 30),), "rows": (0,)}, 2),
            ({}, 2),
        ],
    )
    def test_errors_must_lie_at_the_same_tokens_and_dims(
        self, regions: dict[str, Any], num_causes: int
    ) -> None:
        other = [replace(DIMS, dims=(), **regions)] if "dims" not in regions else [replace(DIMS, **regions)]
        found = causes(failing(0, "q_rope", 90.0, DIMS), failing(0, "k_rope", 90.0, *other))
        assert len(found) == num_causes

    @pytest.mark.parametrize(("rows", "num_causes"), [((0,), 1), ((1,), 2)])
    def test_errors_must_lie_in_the_same_rows(self, rows: tuple[int, ...], num_causes: int) -> None:
        first, second = (replace(DIMS, dims=(), rows=named) for named in ((0,), rows))
        found = causes(failing(0, "q_rope", 90.0, first), failing(0, "k_rope", 90.0, second))
        assert len(found) == num_causes

    def test_keys_have_fewer_heads(self) -> None:
        of_queries, of_keys = (replace(DIMS, dims=(), heads=heads) for heads in ((4, 5, 6, 7), (1,)))
        found = causes(failing(0, "q_rope", 90.0, of_queries), failing(0, "k_rope", 90.0, of_keys))
        assert len(found) == 1

    def test_nan_and_a_figure_are_two_causes(self) -> None:
        nan = [
            SiteResult(layer=0, site=site, status=SiteStatus.FAIL, reason="NaN")
            for site in ("q_norm", "k_norm")
        ]
        assert len(causes(*nan)) == 1
        assert len(causes(nan[0], failing(0, "k_norm", 90.0))) == 2

    def test_golden_without_a_floor_compares_relative_errors(self) -> None:
        found = [
            replace(failing(0, site, 90.0), noise=None, relative=RelativeError(value=value, incoming=0.0))
            for site, value in (("q_norm", 0.3), ("k_norm", 0.28), ("q_rope", 0.3), ("k_rope", 0.1))
        ]
        assert len(causes(*found[:2])) == 1
        assert len(causes(*found[2:])) == 2

    def test_site_behind_others_that_were_not_compared_is_a_cause_of_its_own(self) -> None:
        results = [failing(0, site, 90.0) for site in ("q_rope", "k_rope")]
        hidden = (
            Blame(layer=0, sites=("q_norm", "q_rope"), reason="q_rope"),
            Blame(layer=0, sites=("k_norm", "k_rope"), reason="k_rope"),
        )
        assert join_alike(hidden, results) == hidden


class TestFindings:
    def test_findings_of_one_pass_and_layer_share_their_operation(self) -> None:
        results = [failing(0, site, 90.0) for site in ("q_rope", "k_rope")]
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


class TestCaptures:
    def test_both_norms_scaled_are_one_cause(self, copyist: Any, judge: Callable[..., Comparison]) -> None:
        changes = {(layer, site): scaled(0.8) for layer in (1, 2) for site in (Site.Q_NORM, Site.K_NORM)}
        (group,) = judge(copyist.device_run(changes)).blame_groups
        assert (group.layers, group.sites) == ((1, 2), ("q_norm", "k_norm"))
        assert group.reason.count("× the noise floor") == 2

    def test_both_norms_scaled_otherwise_are_two(
        self, copyist: Any, judge: Callable[..., Comparison]
    ) -> None:
        changes = {(1, Site.Q_NORM): scaled(0.8), (1, Site.K_NORM): scaled(0.3)}
        assert [group.sites for group in judge(copyist.device_run(changes)).blame_groups] == [
            ("q_norm",),
            ("k_norm",),
        ]

    def test_norm_and_rotation_are_two(self, copyist: Any, judge: Callable[..., Comparison]) -> None:
        changes = {(1, Site.Q_NORM): scaled(0.8), (1, Site.K_ROPE): scaled(0.8)}
        groups = judge(copyist.device_run(changes)).blame_groups
        assert [(group.sites, group.operation) for group in groups] == [(("q_norm",), ""), (("k_rope",), "")]


@pytest.fixture(scope="module")
def run_port(toy: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs layers 1 and 2 of a planted port by name."""

    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "run"
        arguments = ["sweep", "--layers", "1:3", "--model", str(toy), "--golden", str(golden), "--quiet"]
        target = [
            "--target",
            f"{PORTS / 'planted.py'}:{name}",
            "--backend",
            "cpu",
            "--output-dir",
            str(folder),
        ]
        assert click.testing.CliRunner().invoke(mm2_test, [*arguments, *target]).exit_code == 1
        return folder

    return run


class TestPorts:
    @pytest.mark.slow
    def test_wrong_rotation_is_one_cause_in_every_report(
        self, run_port: Callable[[str], Path], toy: Path, golden: Path, command: Any, tmp_path: Path
    ) -> None:
        paths = ("--golden", golden, "--run", run_port("InterleavedRotary"), "--model", toy)
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
        self, run_port: Callable[[str], Path], toy: Path, golden: Path
    ) -> None:
        weights = CheckpointWeights(model=str(toy))
        run = judge_run(
            Capture.open(golden),
            Capture.open(run_port("NormPerRank")),
            criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
            layer_pattern="layer_*",
            weights=weights,
        )
        assert [group.sites for group in run.comparison.blame_groups] == [("q_norm",), ("k_norm",)]
        named = diagnose_run(run, weights=weights, mistakes=("qk_norm_per_rank",))
        (group,) = confirm_causes(run, named).blame_groups
        assert (group.layers, group.sites) == ((1, 2), ("q_norm", "k_norm"))
        (first, *_) = named.layers
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

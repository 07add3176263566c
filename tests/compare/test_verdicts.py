"""Whole comparisons: groups of blame, several culprits, chained curves, and criteria of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.cli import main as mm2_compare
from minimax_tools.model.run import full_run
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Comparison, SiteStatus, Verdict

Command = Callable[..., click.testing.Result]
Judge = Callable[..., Comparison]
NUM_LAYERS = 4


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


def noisy(size: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """An error of that size, relative to the tensor, which averages do not show."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        return (tensor.float() + size * tensor.float().square().mean().sqrt() * noise).to(tensor.dtype)

    return change


class TestSmallMistakes:
    def test_scale_of_one_percent_is_found_in_every_projection(self, copyist: Any, judge: Judge) -> None:
        comparison = judge(copyist.device_run({(1, Site.V_PROJ): scaled(1.01)}))
        assert [(one.layer, one.sites) for one in comparison.blame] == [(1, ("v_proj",))]

    def test_offset_below_the_floor_is_found_by_its_average(self, copyist: Any, judge: Judge) -> None:
        def shifted(tensor: torch.Tensor) -> torch.Tensor:
            size = 4e-3 * tensor.float().square().mean().sqrt()
            return (tensor.float() + size).to(tensor.dtype)

        comparison = judge(copyist.device_run({(1, Site.MOE_DELTA): shifted}))
        (site,) = (s for s in comparison.of_layer(1) if s.site == Site.MOE_DELTA)
        assert site.noise is not None
        assert site.noise.whole < 1.2
        assert site.nearest is not None
        assert (site.status, site.nearest.figure) == (SiteStatus.FAIL, "channel_offset")

    def test_golden_itself_passes_with_its_interval_at_one_or_below(self, copyist: Any, judge: Judge) -> None:
        comparison = judge(copyist.device_run())
        assert comparison.verdict is Verdict.PASS
        noises = [site.noise for site in comparison.sites if site.noise is not None]
        assert all(noise.interval is not None for noise in noises)
        # Its variants stray as far or further.
        assert all(low <= noise.whole <= high for noise in noises for low, high in [noise.interval or (0, 0)])
        assert all(0.6 < noise.whole <= 1.0 for noise in noises)


class TestSeveralCulprits:
    def test_layers_with_the_same_culprit_are_one_group(self, copyist: Any, judge: Judge) -> None:
        changes = {(layer, Site.MOE_DELTA): noisy(0.1 * (1 + layer % 2)) for layer in (1, 2, 3)}
        comparison = judge(copyist.device_run({**changes, (2, Site.Q_NORM): scaled(0.8)}))
        assert [(one.layer, one.sites) for one in comparison.blame] == [
            (1, ("moe_delta",)),
            (2, ("q_norm",)),
            (2, ("moe_delta",)),
            (3, ("moe_delta",)),
        ]
        groups = comparison.blame_groups
        assert [(group.layers, group.sites) for group in groups] == [
            ((1, 2, 3), ("moe_delta",)),
            ((2,), ("q_norm",)),
        ]
        assert groups[0].worst_layer in (1, 3)


class TestChainedRuns:
    @pytest.fixture
    def chained(self, copyist: Any) -> Path:
        run = full_run(NUM_LAYERS, sites_level="all")
        path: Path = copyist.device_run(
            {(1, Site.MOE_DELTA): noisy(0.5), (1, Site.OUTPUT): noisy(0.1)}, run=run, name="chained"
        )
        return path

    def test_curve_shows_the_growth_and_its_onset(self, chained: Path, golden: Path, judge: Judge) -> None:
        curve = judge(chained).curve
        assert curve is not None
        assert [point.layer for point in curve.points] == list(range(NUM_LAYERS))
        assert curve.onset == 1
        before, at, after = curve.points[:3]
        assert before.error < at.error
        assert (at.handed_on, at.ratio > 5.0) == (0.0, True)
        # Of the ordinary channels, where it is larger than over all.
        assert after.handed_on >= at.error
        assert after.ratio < 1.5
        assert "mm2-test single-layer --layer 1" in curve.command
        assert f"--golden {golden}" in curve.command

    def test_both_reports_have_it(self, chained: Path, golden: Path, command: Command) -> None:
        sides = ("--golden", golden, "--run", chained)
        text = command(mm2_compare, *sides).stdout
        assert "Error along the chain" in text
        assert "Errors beyond noise begin at layer 1." in text
        record = json.loads(command(mm2_compare, *sides, "--json", "--quiet").stdout)
        assert record["curve"]["onset"] == 1
        assert set(record["curve"]["points"][0]) == {"layer", "error", "handed_on", "floor", "ratio"}
        assert record["blame_groups"][0]["layers"] == [1]


class TestGoldenWithoutFloor:
    """Flips without a floor: nobody can tell whether noise explains them, so a few may occur."""

    @staticmethod
    def flipped(num_tokens: int, *, site: Site) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the first row with some tokens sent to another expert: one of their k = 4 outputs differs."""

        def change(tensor: torch.Tensor) -> torch.Tensor:
            changed = tensor.clone()
            if site is Site.ROUTER_EXPERTS:
                free = [int(set(range(8)).difference(row.tolist()).pop()) for row in tensor[0, :num_tokens]]
                changed[0, :num_tokens, -1] = torch.tensor(free, dtype=tensor.dtype)
            else:
                noise = torch.randn(tensor.shape[1:], generator=torch.Generator().manual_seed(2))
                size = 0.5 * tensor[0].float().square().mean().sqrt()
                changed[0, :num_tokens] = (tensor[0].float() + size * noise)[:num_tokens].to(tensor.dtype)
            return changed

        return change

    @pytest.mark.parametrize(("num_tokens", "verdict"), [(2, Verdict.PASS), (40, Verdict.FAIL)])
    def test_few_flips_pass_and_many_fail(
        self, num_tokens: int, verdict: Verdict, copyist: Any, judge: Judge
    ) -> None:
        changes = {
            (1, site): self.flipped(num_tokens, site=site) for site in (Site.ROUTER_EXPERTS, Site.MOE_DELTA)
        }
        # Shown, the weights would have to be those of the other experts.
        target = copyist.device_run(changes, not_exposed=(Site.ROUTER_WEIGHTS,))
        assert judge(target, reference=copyist.golden(noise_floor="off")).verdict is verdict

    @pytest.mark.parametrize(("num_tokens", "verdict"), [(2, Verdict.PASS), (40, Verdict.FAIL)])
    def test_the_same_where_the_port_hides_its_choice(
        self, num_tokens: int, verdict: Verdict, copyist: Any, judge: Judge
    ) -> None:
        changes = {(1, Site.MOE_DELTA): self.flipped(num_tokens, site=Site.MOE_DELTA)}
        hidden = (Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)
        target = copyist.device_run(changes, not_exposed=hidden)
        assert judge(target, reference=copyist.golden(noise_floor="off")).verdict is verdict


class TestCriteria:
    def test_template_is_a_file_that_criteria_reads(
        self, copyist: Any, golden: Path, tmp_path: Path, command: Command
    ) -> None:
        template = command(mm2_compare, "--criteria-template")
        assert template.exit_code == 0
        (tmp_path / "limits.yaml").write_text(template.stdout, encoding="utf-8")
        sides = ("--golden", golden, "--run", copyist.device_run())
        result = command(mm2_compare, *sides, "--criteria", tmp_path / "limits.yaml", "--json", "--quiet")
        record = json.loads(result.stdout)
        assert (record["verdict"], record["criteria"]) == ("pass", str(tmp_path / "limits.yaml"))

    def test_limits_of_ones_own_decide(
        self, copyist: Any, golden: Path, tmp_path: Path, command: Command
    ) -> None:
        faulty = copyist.device_run({(2, Site.MOE_DELTA): scaled(0.98)})
        sides = ("--golden", golden, "--run", faulty)
        assert command(mm2_compare, *sides).exit_code == 1
        figures = ("whole", "ordinary", "token_median", "token_p99", "token_worst")
        averages = ("token_gain", "channel_gain", "channel_offset", "channel_worst")
        loose = ", ".join(f"{figure}: 1000" for figure in (*figures, *averages))
        (tmp_path / "loose.yml").write_text(f"isolated:\n  moe_delta: {{{loose}}}\n")
        assert command(mm2_compare, *sides, "--criteria", tmp_path / "loose.yml").exit_code == 0


class TestBackends:
    def test_port_that_ran_elsewhere_is_told_that_limits_were_not_measured_there(
        self, copyist: Any, judge: Judge
    ) -> None:
        def elsewhere(description: Any) -> Any:
            provenance = replace(description.provenance, backend="neuron-xla")
            return replace(description, provenance=provenance)

        notes = " ".join(judge(copyist.device_run(describe=elsewhere)).notes)
        assert "not on neuron-xla" in notes
        assert "limits were measured" not in " ".join(judge(copyist.device_run(name="here")).notes)

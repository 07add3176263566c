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
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import full_run, multi_layer_run, single_layer_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import Comparison, SiteStatus, Verdict
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Judge = Callable[..., Comparison]
NUM_LAYERS = 4
ONE_LAYER = single_layer_run(1, sites_level="all")
TRANSFORMERS = Path(__file__).parents[2] / "scripts" / "examples" / "transformers_port.py"


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


def noisy(size: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """An error of that size, relative to the tensor, which averages do not show."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        return (tensor.float() + size * tensor.float().square().mean().sqrt() * noise).to(tensor.dtype)

    return change


def test_scale_and_offset_below_the_floor_are_found_by_averages(copyist: Any, judge: Judge) -> None:
    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        size = 4e-3 * tensor.float().square().mean().sqrt()
        return (tensor.float() + size).to(tensor.dtype)

    comparison = judge(copyist.device_run({(1, Site.V_PROJ): scaled(1.01), (2, Site.MOE_DELTA): shifted}))
    blamed = [(one.layer, one.sites) for one in comparison.blame]
    assert blamed == [(1, ("v_proj",)), (2, ("moe_delta",))]
    (site,) = (site for site in comparison.of_layer(2) if site.site == Site.MOE_DELTA)
    assert site.noise is not None
    assert site.noise.whole < 1.2
    assert site.nearest is not None
    assert (site.status, site.nearest.figure) == (SiteStatus.FAIL, "channel_offset")


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


def test_curve_of_a_chained_run_shows_the_growth_and_its_onset(
    copyist: Any, golden: Path, compare: Any, command: Command
) -> None:
    changes = {(1, Site.MOE_DELTA): noisy(0.5), (1, Site.OUTPUT): noisy(0.1)}
    chained = copyist.device_run(changes, run=full_run(NUM_LAYERS, sites_level="all"))
    _, record = compare(chained)
    curve = record["curve"]
    assert set(curve["points"][0]) == {"layer", "error", "handed_on", "floor", "ratio"}
    assert [point["layer"] for point in curve["points"]] == list(range(NUM_LAYERS))
    assert (curve["onset"], record["blame_groups"][0]["layers"]) == (1, [1])
    before, at, after = curve["points"][:3]
    assert before["error"] < at["error"]
    assert (at["handed_on"], at["ratio"] > 5.0) == (0.0, True)
    # Of the ordinary channels, where it is larger than over all.
    assert after["handed_on"] >= at["error"]
    assert after["ratio"] < 1.5
    assert "mm2-test single-layer --layer 1" in curve["command"]
    assert f"--golden {golden}" in curve["command"]
    text = command(mm2_compare, "--golden", golden, "--run", chained).stdout
    assert "Error along the chain" in text
    assert "Errors beyond noise begin at layer 1." in text


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
    def test_few_flips_pass_and_many_fail_whether_the_port_shows_its_choice_or_not(
        self, num_tokens: int, verdict: Verdict, copyist: Any, judge: Judge
    ) -> None:
        golden = copyist.golden(run=multi_layer_run(Span.single(1), sites_level="all"), noise_floor="off")
        shown = {
            (1, site): self.flipped(num_tokens, site=site) for site in (Site.ROUTER_EXPERTS, Site.MOE_DELTA)
        }
        # Shown, the weights would have to be those of the other experts.
        for hidden in (
            (Site.ROUTER_WEIGHTS,),
            (Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS),
        ):
            changes = {place: change for place, change in shown.items() if place[1] not in hidden}
            run = copyist.device_run(changes, run=ONE_LAYER, not_exposed=hidden, name=f"hides_{len(hidden)}")
            assert judge(run, reference=golden).verdict is verdict

    def test_chain_is_blamed_for_its_fault_and_not_for_what_was_handed_on(
        self, copyist: Any, runs: dict[str, Capture], compare: Any
    ) -> None:
        golden = copyist.golden(noise_floor="off")
        _, record = compare(runs["right"].directory, reference=golden)
        assert (record["verdict"], record["blame"]) == ("pass", [])
        _, record = compare(runs["swapped"].directory, reference=golden)
        assert record["verdict"] == "fail"
        assert (record["blame"][0]["layer"], record["blame"][0]["sites"]) == (1, ["moe_delta"])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "target",
        [
            "builtin",
            "reference",
            f"{TRANSFORMERS}:RoundedWeights",
            f"{TRANSFORMERS}:Eager",
            f"{TRANSFORMERS}:BatchedExperts",
            f"{TRANSFORMERS}:LaterPositions",
        ],
        ids=lambda target: target.rpartition(":")[2],
    )
    def test_right_implementations_of_a_chain_pass(
        self, target: str, toy: Path, copyist: Any, command: Command, tmp_path: Path
    ) -> None:
        golden = copyist.golden(noise_floor="off")
        arguments = ("full", "--model", toy, "--golden", golden, "--target", target, "--sites", "all")
        options = ("--backend", "cpu", "--output-dir", tmp_path / "run", "--json", "--quiet")
        record = json.loads(command(mm2_test, *arguments, *options).stdout)
        assert (record["verdict"], record["blame"]) == ("pass", [])


class TestCriteria:
    def test_template_is_a_file_that_criteria_reads(
        self, copyist: Any, golden: Path, tmp_path: Path, command: Command
    ) -> None:
        template = command(mm2_compare, "--criteria-template")
        assert template.exit_code == 0
        (tmp_path / "limits.yaml").write_text(template.stdout, encoding="utf-8")
        sides = ("--golden", golden, "--run", copyist.device_run(run=ONE_LAYER))
        result = command(mm2_compare, *sides, "--criteria", tmp_path / "limits.yaml", "--json", "--quiet")
        record = json.loads(result.stdout)
        assert (record["verdict"], record["criteria"]) == ("pass", str(tmp_path / "limits.yaml"))

    def test_limits_of_ones_own_decide(
        self, copyist: Any, golden: Path, tmp_path: Path, command: Command
    ) -> None:
        faulty = copyist.device_run({(1, Site.MOE_DELTA): scaled(0.98)}, run=ONE_LAYER)
        sides = ("--golden", golden, "--run", faulty)
        assert command(mm2_compare, *sides).exit_code == 1
        figures = ("whole", "ordinary", "token_median", "token_p99", "token_worst")
        averages = ("token_gain", "channel_gain", "channel_offset", "channel_worst")
        loose = ", ".join(f"{figure}: 1000" for figure in (*figures, *averages))
        (tmp_path / "loose.yml").write_text(f"isolated:\n  moe_delta: {{{loose}}}\n")
        assert command(mm2_compare, *sides, "--criteria", tmp_path / "loose.yml").exit_code == 0


def test_port_that_ran_elsewhere_is_told_that_limits_were_not_measured_there(
    copyist: Any, judge: Judge
) -> None:
    def elsewhere(description: Any) -> Any:
        return replace(description, provenance=replace(description.provenance, backend="neuron-xla"))

    notes = judge(copyist.device_run(run=ONE_LAYER, describe=elsewhere)).notes
    assert "not on neuron-xla" in " ".join(notes)

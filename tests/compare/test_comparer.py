"""Whole comparisons: what is blamed, what keeps a verdict open, and captures that were damaged meanwhile."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from damage.tampering import change_tensor

from compare.cli import main as mm2_compare
from compare.comparer import compare_captures
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.run import (
    Component,
    component_run,
    full_run,
    multi_layer_run,
    single_layer_run,
    sweep_run,
)
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus, Verdict
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Judge = Callable[..., Comparison]

NUM_LAYERS = 4
ONE_LAYER = single_layer_run(1, sites_level="all")
TRANSFORMERS = Path(__file__).parents[2] / "scripts" / "examples" / "transformers_port.py"
# Of each layer: all sites but the input.
NUM_SITES = len(ModelGraph().sites) - 1
# The second row of the toy's batch has 33 tokens of 48.
PADDING = (1, slice(33, None))


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


def with_value(value: float, *place: int | slice) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return change


def nudge(tensor: torch.Tensor) -> torch.Tensor:
    """Replace one element of a real token by its neighbour."""
    tensor[0, 3, 5] = torch.nextafter(tensor[0, 3, 5], tensor.new_tensor(math.inf))
    return tensor


def site_of(comparison: Comparison, layer: int | None, site: Site | ModelSite) -> SiteResult:
    (found,) = [one for one in comparison.of_layer(layer) if one.site == site]
    return found


def blamed(comparison: Comparison) -> list[tuple[int | None, tuple[str, ...]]]:
    return [(blame.layer, blame.sites) for blame in comparison.blame]


class TestIsolated:
    def test_faults_of_several_layers_are_blamed_in_order(self, copyist: Any, judge: Judge) -> None:
        def upset(tensor: torch.Tensor) -> torch.Tensor:
            tensor[1, 20] = -tensor[1, 20]
            return tensor

        changes = {
            (3, Site.Q_PROJ): scaled(0.9),
            (2, Site.ATTN_DELTA): scaled(0.9),
            (0, Site.V_PROJ): upset,
        }
        comparison = judge(copyist.device_run(changes))
        assert comparison.verdict is Verdict.FAIL
        assert blamed(comparison) == [(0, ("v_proj",)), (2, ("attn_delta",)), (3, ("q_proj",))]
        noise = site_of(comparison, 0, Site.V_PROJ).noise
        assert noise is not None
        assert noise.worst_token == (1, 20)
        result = site_of(comparison, 2, Site.ATTN_DELTA)
        assert result.metrics is not None
        assert result.metrics.norm_ratio == pytest.approx(0.9, abs=1e-3)
        assert result.metrics.cosine_similarity == pytest.approx(1.0, abs=1e-4)
        assert result.reason.endswith("norm ×0.9")

    def test_component_run_is_judged_within_its_border(self, copyist: Any, judge: Judge) -> None:
        run = component_run(1, Component.MOE)
        assert judge(copyist.device_run(run=run)).verdict is Verdict.PASS
        faulty = copyist.device_run({(1, Site.MOE_DELTA): scaled(0.9)}, run=run, name="faulty")
        comparison = judge(faulty)
        assert blamed(comparison) == [(1, ("moe_delta",))]
        assert comparison.of == 4

    def test_run_that_repeats_the_golden_passes_everywhere(self, copyist: Any, judge: Judge) -> None:
        comparison = judge(copyist.device_run())
        assert (comparison.verdict, comparison.blame, comparison.notes) == (Verdict.PASS, (), ())
        assert comparison.compared == comparison.of == NUM_LAYERS * NUM_SITES
        assert all(site.status is SiteStatus.PASS for site in comparison.sites)
        noises = [site.noise for site in comparison.sites if site.noise]
        assert len(noises) == NUM_LAYERS * (NUM_SITES - 1)
        # In units of the golden's variants, of which some stray further than the golden.
        assert all(0.6 < noise.whole <= 1.0 for noise in noises)
        intervals = [(noise.whole, noise.interval or (9.0, 0.0)) for noise in noises]
        assert all(low <= whole <= high for whole, (low, high) in intervals)


class TestUnfinishedRun:
    def test_layers_that_did_not_run_keep_the_verdict_open(self, copyist: Any, judge: Judge) -> None:
        stopped = copyist.device_run(stop_before=2)
        comparison = judge(stopped)
        assert (comparison.compared, comparison.of) == (2 * NUM_SITES, NUM_LAYERS * NUM_SITES)
        assert (comparison.verdict, comparison.blame) == (Verdict.INCOMPARABLE, ())
        assert comparison.notes == ("the run is not complete: run it again and it resumes",)
        assert site_of(comparison, 3, Site.OUTPUT).reason == "not run: the run stopped before it"
        alone = judge(stopped, pattern="layer_[01]")
        assert (alone.verdict, alone.of) == (Verdict.PASS, 2 * NUM_SITES)

    def test_fault_in_the_layers_that_ran_is_a_failure(self, copyist: Any, judge: Judge) -> None:
        comparison = judge(copyist.device_run({(0, Site.Q_PROJ): scaled(0.9)}, stop_before=1))
        assert (comparison.verdict, blamed(comparison)) == (Verdict.FAIL, [(0, ("q_proj",))])

    def test_missing_model_sites_keep_the_verdict_open_too(self, copyist: Any, judge: Judge) -> None:
        run = full_run(NUM_LAYERS, sites_level="all")
        changes = dict.fromkeys((None, site) for site in ModelSite)
        target = copyist.device_run(changes, run=run)
        finished = judge(target)
        assert (finished.verdict, finished.of) == (Verdict.FAIL, NUM_LAYERS * NUM_SITES + 3)
        manifest = target / "manifest.json"
        text = manifest.read_text(encoding="utf-8")
        manifest.write_text(text.replace('"complete": true', '"complete": false'), encoding="utf-8")
        assert judge(target).verdict is Verdict.INCOMPARABLE
        assert judge(target, pattern="layer_[0-2]").verdict is Verdict.PASS


class TestChained:
    @staticmethod
    def drifting(copyist: Any, share: float, run: Any, *, first: int = 0) -> Path:
        """A chained run whose layers hand on an error of that share, as noise would."""

        def drift(tensor: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(tensor.shape, generator=generator)
            return (tensor.float() * (1 + share * noise)).to(tensor.dtype)

        # The layer that begins to drift shows it in its output alone; what follows shows it at every site.
        changes = {(first, Site.OUTPUT): drift} | {
            (layer, site): drift
            for layer in range(first + 1, run.span.stop)
            for site in ModelGraph().sites
            if site not in (Site.INPUT, Site.ROUTER_EXPERTS)
        }
        return copyist.device_run(changes, run=run)  # type: ignore[no-any-return]  # a fixture's value

    CHAIN = multi_layer_run(Span(0, NUM_LAYERS), sites_level="all")

    def test_layer_that_repeats_its_input_is_judged_as_if_isolated(self, copyist: Any, judge: Judge) -> None:
        assert judge(copyist.device_run(run=self.CHAIN)).verdict is Verdict.PASS
        faulty = copyist.device_run({(2, Site.MOE_DELTA): scaled(0.9)}, run=self.CHAIN, name="faulty")
        comparison = judge(faulty)
        assert blamed(comparison) == [(2, ("moe_delta",))]
        assert "chained run" not in comparison.blame[0].reason

    def test_error_that_is_handed_on_widens_the_floor(self, copyist: Any, judge: Judge) -> None:
        comparison = judge(self.drifting(copyist, 0.02, self.CHAIN))
        assert blamed(comparison) == [(0, ("output",))]
        noise = site_of(comparison, 1, Site.INPUT_NORM).noise
        assert noise is not None
        assert noise.incoming == pytest.approx(0.02, rel=0.3)
        assert all(site.status is not SiteStatus.FAIL for site in comparison.of_layer(1))

    def test_onset_alone_is_blamed(self, copyist: Any, judge: Judge) -> None:
        changes = {(layer, Site.ATTN_DELTA): scaled(3.0) for layer in (2, 3)}
        both = judge(copyist.device_run(changes, run=self.CHAIN))
        assert [blame.layer for blame in both.blame] == [2, 3]
        changes[2, Site.OUTPUT] = scaled(1.01)
        comparison = judge(copyist.device_run(changes, run=self.CHAIN, name="handed_on"))
        assert {blame.layer for blame in comparison.blame} == {2}
        assert any(site.status is SiteStatus.FAIL for site in comparison.of_layer(3))

    def test_without_weights_an_onset_behind_an_error_blames_nobody(self, copyist: Any, judge: Judge) -> None:
        changes = {(1, Site.OUTPUT): nudge, (2, Site.ATTN_DELTA): scaled(3.0)}
        comparison = judge(copyist.device_run(changes, run=self.CHAIN))
        assert (comparison.verdict, comparison.blame) == (Verdict.FAIL, ())
        assert comparison.curve is not None
        assert comparison.curve.onset == 2
        assert all(point.floor is not None for point in comparison.curve.points)
        assert "mm2-test single-layer --layer 2" in comparison.curve.command

    def test_nan_that_is_handed_on_fails_every_later_layer(self, copyist: Any, judge: Judge) -> None:
        run = multi_layer_run(Span(0, NUM_LAYERS), sites_level="layer")
        changes = {(1, Site.OUTPUT): with_value(math.nan, 0, 3)}
        comparison = judge(copyist.device_run(changes, run=run))
        assert blamed(comparison)[0][0] == 1
        assert len(comparison.blame) == 1
        assert site_of(comparison, 2, Site.OUTPUT).reason == "the layer's input already held NaN or Inf"


class TestModelSites:
    RUN = full_run(NUM_LAYERS, sites_level="all")

    def test_whole_model_is_judged_outside_its_layers_too(self, copyist: Any, judge: Judge) -> None:
        target = copyist.device_run({(None, ModelSite.EMBEDDING): with_value(9.0, *PADDING)}, run=self.RUN)
        comparison = judge(target)
        assert (comparison.verdict, comparison.of) == (Verdict.PASS, NUM_LAYERS * NUM_SITES + 3)
        assert [site.site for site in comparison.of_layer(None)] == ["embedding", "final_norm", "logits"]
        chosen = judge(target, pattern="layer_3")
        assert (chosen.layers, chosen.of_layer(None)) == ((3,), ())

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({(None, ModelSite.FINAL_NORM): 0.9, (None, ModelSite.LOGITS): 0.9}, (None, ("final_norm",))),
            # The head is not blamed for what it was handed.
            ({(3, Site.OUTPUT): 1.1, (None, ModelSite.LOGITS): 3.0}, (3, ("output",))),
        ],
    )
    def test_head_is_blamed_where_the_layers_are_right(
        self, changes: dict[Any, float], expected: Any, copyist: Any, judge: Judge
    ) -> None:
        made = {place: scaled(factor) for place, factor in changes.items()}
        assert blamed(judge(copyist.device_run(made, run=self.RUN))) == [expected]

    def test_embedding_is_a_lookup_and_must_be_equal_bit_for_bit(self, copyist: Any, judge: Judge) -> None:
        comparison = judge(copyist.device_run({(None, ModelSite.EMBEDDING): nudge}, run=self.RUN))
        assert blamed(comparison) == [(None, ("embedding",))]
        # A wrong one is blamed before the layers that it is handed to.
        wrong = scaled(1.5)
        changes = {(None, ModelSite.EMBEDDING): wrong, (0, Site.INPUT): wrong, (0, Site.Q_PROJ): scaled(9.0)}
        comparison = judge(copyist.device_run(changes, run=self.RUN, name="wrong"))
        assert blamed(comparison)[0] == (None, ("embedding",))


class TestLayers:
    def test_unfinished_golden_judges_the_layers_it_holds(self, copyist: Any, judge: Judge) -> None:
        reference = copyist.golden(stop_before=2)
        target = copyist.device_run(run=sweep_run(Span(0, 2), sites_level="all"))
        comparison = judge(target, reference=reference)
        assert comparison.verdict is Verdict.PASS
        assert comparison.notes == ("the golden is not complete: run it again and it resumes",)


def test_router_dtypes_that_change_experts_are_told(copyist: Any, judge: Judge) -> None:
    dtypes = {"correction_bias": "bfloat16", "router_gate": "float32"}
    comparison = judge(copyist.device_run(run=ONE_LAYER, observed_dtypes=dtypes))
    (found,) = comparison.router_dtypes
    assert (found.name, found.reference, found.target) == ("correction_bias", "float32", "bfloat16")
    assert "no token of this run chose other experts beyond noise" in found.consequence
    assert comparison.verdict is Verdict.WARN
    told = "the port holds correction_bias in bfloat16, the golden in float32: in BF16 it moves"
    assert any(note.startswith(told) for note in comparison.notes)


def test_device_run_in_the_goldens_place_is_told(copyist: Any, judge: Judge) -> None:
    run = copyist.device_run()
    comparison = judge(copyist.device_run(name="other"), reference=run)
    assert comparison.verdict is Verdict.PASS
    assert any(note.endswith("on a device, not a golden") for note in comparison.notes)


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

    comparison = judge(copyist.device_run({(1, Site.MOE_DELTA): shifted, (2, Site.V_PROJ): scaled(1.01)}))
    blamed = [(one.layer, one.sites) for one in comparison.blame]
    assert blamed == [(1, ("moe_delta",)), (2, ("v_proj",))]
    (site,) = (site for site in comparison.of_layer(1) if site.site == Site.MOE_DELTA)
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


def test_curve_of_a_chain_shows_its_onset(
    copyist: Any, golden: Path, judge: Judge, compare: Any, command: Command
) -> None:
    changes = {(1, Site.MOE_DELTA): noisy(0.5), (1, Site.OUTPUT): noisy(0.1)}
    chained = copyist.device_run(changes, run=full_run(NUM_LAYERS, sites_level="all"))
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
    # Both reports have it.
    _, record = compare(chained)
    assert record["curve"]["onset"] == 1
    assert set(record["curve"]["points"][0]) == {"layer", "error", "handed_on", "floor", "ratio"}
    assert record["blame_groups"][0]["layers"] == [1]
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
    def test_criteria_read_their_template(
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


def test_limits_that_were_not_measured_on_a_backend_are_told(copyist: Any, judge: Judge) -> None:
    def elsewhere(description: Any) -> Any:
        return replace(description, provenance=replace(description.provenance, backend="neuron-xla"))

    notes = judge(copyist.device_run(run=ONE_LAYER, describe=elsewhere)).notes
    assert "not on neuron-xla" in " ".join(notes)


# No verdict is told of captures that were damaged, whatever judging them came to.


def judge_opened(golden: Capture, run: Capture) -> Comparison:
    return compare_captures(
        golden,
        run,
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        layer_pattern="layer_*",
    )


def damage(directory: Path) -> None:
    change_tensor(directory, "layer_1.safetensors", "output", torch.zeros_like)


def make_sides(copyist: Any, *, fails: bool) -> tuple[Path, Path]:
    """Write a golden and a run; judging them `fails` at layer 3, behind the layer that may be damaged."""
    broken = {(3, Site.OUTPUT): lambda tensor: tensor * torch.nan} if fails else {}
    run = multi_layer_run(Span(1, 4), sites_level="layer")
    return copyist.golden(broken, run=run), copyist.device_run(run=run)


def test_what_is_whole_is_judged(copyist: Any) -> None:
    golden, run = map(Capture.open, make_sides(copyist, fails=False))
    assert judge_opened(golden, run).verdict is Verdict.PASS
    assert judge_opened(run, run).verdict is Verdict.PASS


def test_what_judging_raises_is_raised(copyist: Any) -> None:
    golden, run = map(Capture.open, make_sides(copyist, fails=True))
    with pytest.raises(IncomparableError, match="the golden's output of layer 3"):
        judge_opened(golden, run)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("side", [0, 1])
def test_damage_is_told_whatever_came_of_it(copyist: Any, side: int, *, fails: bool) -> None:
    paths = make_sides(copyist, fails=fails)
    damage(paths[side])
    golden, run = map(Capture.open, paths)
    with pytest.raises(CaptureError, match=rf"{('golden', 'run')[side]} .*output of layer 1"):
        judge_opened(golden, run)
    # It is not taken for proved since.
    with pytest.raises(CaptureError, match="output of layer 1"):
        (golden, run)[side].read(1, Site.OUTPUT)


def test_of_two_damaged_sides_the_golden_is_named(copyist: Any) -> None:
    paths = make_sides(copyist, fails=False)
    for directory in paths:
        damage(directory)
    with pytest.raises(CaptureError, match="the golden"):
        judge_opened(*map(Capture.open, paths))

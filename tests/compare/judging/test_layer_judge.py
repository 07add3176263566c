from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.run import full_run, single_layer_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus, Verdict
from reports.terminal import render_comparison

Judge = Callable[..., Comparison]

NUM_LAYERS = 4
# Of each layer: all sites but the input.
NUM_SITES = len(Site) - 1
# The second row of the toy's batch has 33 tokens of 48.
PADDING = (1, slice(33, None))


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


def with_value(value: float | torch.Tensor, *place: int | slice) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return change


def site_of(comparison: Comparison, layer: int | None, site: Site | ModelSite) -> SiteResult:
    (found,) = [one for one in comparison.of_layer(layer) if one.site == site]
    return found


def blamed(comparison: Comparison) -> list[tuple[int | None, tuple[str, ...]]]:
    return [(blame.layer, blame.sites) for blame in comparison.blame]


class TestFailClosed:
    def test_other_shape_is_a_failure(self, copyist: Any, judge: Judge) -> None:
        comparison = judge(copyist.device_run({(0, Site.Q_NORM): lambda tensor: tensor[..., :-8]}))
        result = site_of(comparison, 0, Site.Q_NORM)
        assert (result.status, result.metrics) == (SiteStatus.FAIL, None)
        width = copyist.source.read(0, Site.Q_NORM).shape[-1]
        assert result.reason == f"shape: expected (2, 48, {width}), found (2, 48, {width - 8})"
        assert blamed(comparison) == [(0, ("q_norm",))]

    @pytest.mark.parametrize("site", [Site.POST_NORM, Site.ROUTER_EXPERTS])
    def test_whole_numbers_for_fractions_and_the_reverse_are_a_failure(
        self, site: Site, copyist: Any, judge: Judge
    ) -> None:
        def retype(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(torch.int64 if tensor.is_floating_point() else torch.float32)

        result = site_of(judge(copyist.device_run({(0, site): retype})), 0, site)
        assert result.status is SiteStatus.FAIL
        assert result.reason.startswith("dtype: expected torch.")

    def test_right_values_in_float32_are_one_note(self, copyist: Any, judge: Judge) -> None:
        places = [(layer, site) for layer in (0, 1) for site in (Site.Q_PROJ, Site.POST_NORM)]
        comparison = judge(copyist.device_run(dict.fromkeys(places, torch.Tensor.float)))
        assert comparison.verdict is Verdict.PASS
        (note,) = (note for note in comparison.notes if "float32" in note)
        assert note == ("layers 0-1, q_proj, post_norm: shown in float32, where the golden holds bfloat16")

    def test_right_values_in_float16_are_worth_a_warning(self, copyist: Any, judge: Judge) -> None:
        comparison = judge(copyist.device_run({(0, Site.POST_NORM): torch.Tensor.half}))
        reason = "dtype: expected torch.bfloat16, found torch.float16"
        assert site_of(comparison, 0, Site.POST_NORM).reason == reason
        assert (comparison.verdict, comparison.verdict.exit_code) == (Verdict.WARN, 0)
        headline = render_comparison(comparison, width=200).partition("\n")[0]
        assert headline == f"WARN: first at layer 0, post_norm: {reason}"

    def test_site_that_was_declared_and_not_stored_is_a_failure(self, copyist: Any, judge: Judge) -> None:
        comparison = judge(copyist.device_run({(1, Site.K_ROPE): None}))
        result = site_of(comparison, 1, Site.K_ROPE)
        assert result.status is SiteStatus.FAIL
        assert result.reason == "missing: the run declared it and did not store it"
        assert comparison.verdict is Verdict.FAIL

    def test_site_that_the_port_does_not_expose_is_not_compared(self, copyist: Any, judge: Judge) -> None:
        hidden = (Site.Q_ROPE, Site.K_ROPE)
        comparison = judge(copyist.device_run(not_exposed=hidden))
        assert comparison.verdict is Verdict.PASS
        assert (comparison.compared, comparison.of) == (
            NUM_LAYERS * (NUM_SITES - len(hidden)),
            NUM_LAYERS * NUM_SITES,
        )
        assert site_of(comparison, 0, Site.Q_ROPE).status is SiteStatus.NOT_EXPOSED

    def test_site_that_the_golden_lacks_is_not_compared(self, copyist: Any, judge: Judge) -> None:
        reference = copyist.golden(run=full_run(NUM_LAYERS, sites_level="layer"))
        comparison = judge(copyist.device_run(), reference=reference)
        assert comparison.verdict is Verdict.PASS
        assert (comparison.compared, comparison.of) == (NUM_LAYERS, NUM_LAYERS * NUM_SITES)
        assert site_of(comparison, 0, Site.Q_ROPE).status is SiteStatus.NOT_CAPTURED

    def test_run_with_nothing_to_compare_is_incomparable(self, copyist: Any, judge: Judge) -> None:
        reference = copyist.golden(run=full_run(NUM_LAYERS, sites_level="layer"))
        run = replace(single_layer_run(0, sites_level="all"), sites=(Site.INPUT, Site.Q_PROJ))
        comparison = judge(copyist.device_run(run=run), reference=reference)
        assert (comparison.compared, comparison.of) == (0, 1)
        assert (comparison.verdict, comparison.verdict.exit_code) == (Verdict.INCOMPARABLE, 3)

    @pytest.mark.parametrize("file", ["layer_2.safetensors", "inputs.safetensors"])
    def test_missing_file_is_an_error(self, file: str, copyist: Any, judge: Judge) -> None:
        target = copyist.device_run()
        (target / file).unlink()
        with pytest.raises(CaptureError, match=file):
            judge(target)

    def test_damaged_file_is_an_error(self, copyist: Any, judge: Judge) -> None:
        target = copyist.device_run()
        path = target / "layer_2.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(CaptureError, match=r"layer_2\.safetensors cannot be read"):
            judge(target)

    def test_missing_twin_is_an_error_and_no_other_way_of_judging(self, copyist: Any, judge: Judge) -> None:
        reference = copyist.golden()
        (reference / "layer_1.fp32.safetensors").unlink()
        with pytest.raises(CaptureError, match=r"layer_1\.fp32\.safetensors"):
            judge(copyist.device_run(), reference=reference)


class TestNonfinite:
    @pytest.mark.parametrize("bad", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
    def test_nan_on_a_real_row_fails_where_it_first_stands(
        self, bad: float, copyist: Any, judge: Judge
    ) -> None:
        changes = {
            (1, site): with_value(bad, 1, 20)
            for site in (Site.ATTN_CONTEXT, Site.ATTN_DELTA, Site.ATTN_RESIDUAL, Site.POST_NORM)
        }
        comparison = judge(copyist.device_run(changes))
        assert blamed(comparison) == [(1, ("attn_context",))]
        result = site_of(comparison, 1, Site.ATTN_CONTEXT)
        assert result.reason.endswith("NaN or Inf on real tokens, the first at row 1, token 20")
        assert result.metrics is not None
        assert result.metrics.num_nonfinite_target == copyist.source.read(1, Site.ATTN_CONTEXT).shape[-1]

    def test_nan_behind_another_fault_is_told_in_a_note(self, copyist: Any, judge: Judge) -> None:
        changes = {(1, Site.Q_PROJ): scaled(0.9), (1, Site.Q_NORM): with_value(math.nan, 0, 3)}
        comparison = judge(copyist.device_run(changes))
        assert blamed(comparison) == [(1, ("q_proj",))]
        assert comparison.notes == ("the first NaN or Inf on a real token is at q_norm of layer 1",)

    @pytest.mark.parametrize(
        "garbage", [math.nan, *(pytest.param(one, marks=pytest.mark.slow) for one in (math.inf, 1e30))]
    )
    def test_padding_does_not_matter_at_all(self, garbage: float, copyist: Any, judge: Judge) -> None:
        floats = [site for site in Site if site not in (Site.INPUT, Site.ROUTER_EXPERTS)]
        changes: dict[tuple[int | None, Site], Any] = {}
        for site in floats:
            place = (1, slice(None), PADDING[1]) if site.has_heads_dim else PADDING
            changes |= {(layer, site): with_value(garbage, *place) for layer in range(NUM_LAYERS)}
        changes |= {(layer, Site.ROUTER_EXPERTS): with_value(0, *PADDING) for layer in range(NUM_LAYERS)}
        assert judge(copyist.device_run(changes)).sites == judge(copyist.device_run(name="clean")).sites

    def test_nan_on_padding_of_the_golden_does_not_matter_either(self, copyist: Any, judge: Judge) -> None:
        changes = {(1, site): with_value(math.nan, *PADDING) for site in (Site.MOE_DELTA, Site.POST_NORM)}
        comparison = judge(copyist.device_run(), reference=copyist.golden(changes))
        assert comparison.verdict is Verdict.PASS

    @pytest.mark.parametrize("criteria", ["noise", "classic"])
    def test_nan_in_the_golden_is_nobodys_fault(self, criteria: str, copyist: Any, judge: Judge) -> None:
        reference = copyist.golden({(1, Site.MOE_DELTA): with_value(math.nan, 0, 3, 5)})
        with pytest.raises(IncomparableError, match="the golden's moe_delta of layer 1 holds 1 NaN or Inf"):
            judge(copyist.device_run(), reference=reference, criteria=criteria)


class TestRouting:
    @staticmethod
    def fragile_tokens(copyist: Any, layer: int) -> torch.Tensor:
        """Real tokens in ascending order of their margins, [T,2]."""
        margin = copyist.source.read_floor(layer, "router_margin")
        mask = copyist.source.read_attention_mask().bool()
        order = margin.masked_fill(~mask, math.inf).flatten().argsort()[: int(mask.sum())]
        return torch.stack((order // mask.shape[1], order % mask.shape[1]), dim=-1)

    def flip(self, copyist: Any, layer: int, rank: int) -> dict[tuple[int, Site], Any]:
        """The `rank`-th most fragile token goes to another expert: its weight follows, the outputs change much."""
        row, position = self.fragile_tokens(copyist, layer)[rank].tolist()

        def other_expert(experts: torch.Tensor) -> torch.Tensor:
            chosen = set(experts[row, position].tolist())
            experts[row, position, 0] = next(expert for expert in range(32) if expert not in chosen)
            return experts

        experts = other_expert(copyist.source.read(layer, Site.ROUTER_EXPERTS))[row, position]
        scores = copyist.source.read(layer, Site.ROUTER_LOGITS)[row, position].float().sigmoid()[experts]
        upset = with_value(0.5, row, position)
        return {
            (layer, Site.ROUTER_EXPERTS): other_expert,
            (layer, Site.ROUTER_WEIGHTS): with_value(scores / scores.sum(), row, position),
            (layer, Site.MOE_DELTA): upset,
            (layer, Site.OUTPUT): upset,
        }

    def test_weights_that_do_not_follow_their_experts_fail(self, copyist: Any, judge: Judge) -> None:
        order = torch.tensor([2, 0, 3, 1])
        comparison = judge(
            copyist.device_run({(1, Site.ROUTER_WEIGHTS): lambda weights: weights[..., order]})
        )
        assert blamed(comparison) == [(1, ("router_weights",))]

    def test_flip_within_the_noise_passes_and_its_token_is_set_aside(
        self, copyist: Any, judge: Judge
    ) -> None:
        comparison = judge(copyist.device_run(self.flip(copyist, 1, rank=0)))
        assert comparison.verdict is Verdict.PASS
        routing = site_of(comparison, 1, Site.ROUTER_EXPERTS).routing
        assert routing is not None
        assert (routing.num_tokens, routing.num_flipped, routing.num_explained) == (81, 1, 1)
        for site in (Site.MOE_DELTA, Site.OUTPUT):
            assert site_of(comparison, 1, site).num_set_aside == 1
        weights = site_of(comparison, 1, Site.ROUTER_WEIGHTS)
        assert (weights.num_set_aside, weights.num_replayed) == (0, 1)
        assert (
            "1 token in 1 layer went to other experts, not judged behind them: "
            "--model judges them against the golden with the port's own experts"
        ) in comparison.notes

    def test_weights_past_a_flip_are_judged_by_the_goldens_logits(self, copyist: Any, judge: Judge) -> None:
        changes = self.flip(copyist, 1, rank=0)
        row, position = self.fragile_tokens(copyist, 1)[0].tolist()
        changes[1, Site.ROUTER_WEIGHTS] = with_value(0.5, row, position)
        assert blamed(judge(copyist.device_run(changes))) == [(1, ("router_weights",))]

    def test_flip_beyond_the_noise_is_the_routers_fault(self, copyist: Any, judge: Judge) -> None:
        comparison = judge(copyist.device_run(self.flip(copyist, 1, rank=-1)))
        assert blamed(comparison) == [(1, ("router_experts",))]
        assert "1 of 81 tokens chose other experts beyond noise" in comparison.blame[0].reason

    def test_fault_of_the_experts_shows_beside_a_flip(self, copyist: Any, judge: Judge) -> None:
        changes = {**self.flip(copyist, 1, rank=0), (1, Site.MOE_DELTA): scaled(0.9)}
        assert blamed(judge(copyist.device_run(changes))) == [(1, ("moe_delta",))]

    def test_port_that_hides_its_experts_is_judged_on_tokens_that_cannot_flip(
        self, copyist: Any, judge: Judge
    ) -> None:
        hidden = tuple(site for site in Site if site not in (Site.INPUT, Site.OUTPUT))
        changes = self.flip(copyist, 1, rank=0)
        comparison = judge(copyist.device_run(changes, not_exposed=hidden))
        assert comparison.verdict is Verdict.PASS
        assert 0 < site_of(comparison, 1, Site.OUTPUT).num_set_aside < 40
        beyond = copyist.device_run(self.flip(copyist, 1, rank=-1), not_exposed=hidden, name="beyond")
        (blame,) = judge(beyond).blame
        assert blame.sites == tuple(str(site) for site in Site if site is not Site.INPUT)

    def test_output_on_which_no_expert_is_sure_is_not_judged(self, copyist: Any, judge: Judge) -> None:
        changes = {
            (1, Site.ROUTER_EXPERTS): lambda experts: (experts + 1) % 32,
            (1, Site.MOE_DELTA): scaled(0.5),
        }
        comparison = judge(copyist.device_run(changes))
        assert site_of(comparison, 1, Site.MOE_DELTA).status is SiteStatus.NOT_JUDGED
        assert blamed(comparison) == [(1, ("router_experts",))]


class TestFloorKept:
    def test_statistics_judge_like_the_twin_but_say_that_they_estimate(
        self, copyist: Any, judge: Judge
    ) -> None:
        reference = copyist.golden(noise_floor="stats")
        clean = judge(copyist.device_run(), reference=reference)
        assert clean.verdict is Verdict.PASS
        assert "the golden kept only the floor's statistics: ρ is an estimate" in clean.notes
        target = copyist.device_run({(2, Site.MOE_DELTA): scaled(0.9)}, name="faulty")
        full, estimate = (
            site_of(comparison, 2, Site.MOE_DELTA).noise
            for comparison in (judge(target), judge(target, reference=reference))
        )
        assert full is not None
        assert estimate is not None
        assert (full.is_estimated, estimate.is_estimated) == (False, True)
        assert estimate.whole == pytest.approx(full.whole, rel=0.02)

    def test_statistics_judge_the_models_head_too(self, copyist: Any, judge: Judge) -> None:
        run = full_run(NUM_LAYERS, sites_level="all")
        target = copyist.device_run({(None, ModelSite.LOGITS): scaled(0.9)}, run=run)
        comparison = judge(target, reference=copyist.golden(noise_floor="stats"))
        assert blamed(comparison) == [(None, ("logits",))]
        noise = site_of(comparison, None, ModelSite.FINAL_NORM).noise
        assert noise is not None
        assert noise.is_estimated

    def test_golden_without_a_floor_is_coarser_and_says_so(self, copyist: Any, judge: Judge) -> None:
        reference = copyist.golden(noise_floor="off")
        changes = {(1, Site.MOE_DELTA): scaled(0.98), (2, Site.MOE_DELTA): scaled(0.9)}
        comparison = judge(copyist.device_run(changes), reference=reference)
        assert blamed(comparison) == [(2, ("moe_delta",))]
        assert blamed(judge(copyist.device_run(changes))) == [(1, ("moe_delta",)), (2, ("moe_delta",))]
        assert any(note.startswith("the golden kept no noise floor") for note in comparison.notes)

    def test_float32_is_judged_by_a_limit_of_its_own(self, copyist: Any, judge: Judge) -> None:
        def in_float32(description: Description) -> Description:
            dtypes = {**description.provenance.dtypes, "weights": "float32"}
            return replace(description, provenance=replace(description.provenance, dtypes=dtypes))

        reference = copyist.golden(noise_floor="off", describe=in_float32)
        comparison = judge(copyist.device_run(describe=in_float32), reference=reference)
        assert comparison.verdict is Verdict.PASS
        assert not any("noise floor" in note for note in comparison.notes)
        changes = {(1, Site.MOE_DELTA): scaled(0.99)}
        faulty = copyist.device_run(changes, describe=in_float32, name="faulty")
        assert blamed(judge(faulty, reference=reference)) == [(1, ("moe_delta",))]

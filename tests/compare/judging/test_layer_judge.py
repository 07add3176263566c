from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.errors import CaptureError
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.run import full_run, single_layer_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus, Verdict
from reports.terminal import render_comparison

Judge = Callable[..., Comparison]

NUM_LAYERS = 4
# Of each layer: all sites but the input.
NUM_SITES = len(ModelGraph().sites) - 1
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
    def test_other_shapes_dtypes_and_missing_sites_fail(self, copyist: Any, judge: Judge) -> None:
        changes = {
            (0, Site.Q_NORM): lambda tensor: tensor[..., :-8],
            (1, Site.K_ROPE): None,
            # Whole numbers for fractions, and the reverse.
            (2, Site.POST_NORM): torch.Tensor.long,
            (3, Site.ROUTER_EXPERTS): torch.Tensor.float,
        }
        comparison = judge(copyist.device_run(changes))
        width = copyist.source.read(0, Site.Q_NORM).shape[-1]
        reasons = (
            f"shape: expected (2, 48, {width}), found (2, 48, {width - 8})",
            "missing: the run declared it and did not store it",
            "dtype: expected torch.bfloat16, found torch.int64",
            "dtype: expected torch.int64, found torch.float32",
        )
        for (layer, site), reason in zip(changes, reasons, strict=True):
            result = site_of(comparison, layer, site)
            assert (result.status, result.reason, result.metrics) == (SiteStatus.FAIL, reason, None)
        assert comparison.verdict is Verdict.FAIL
        assert blamed(comparison)[0] == (0, ("q_norm",))

    def test_float32_is_one_note_and_float16_a_warning(self, copyist: Any, judge: Judge) -> None:
        finer = [(layer, site) for layer in (0, 1) for site in (Site.Q_PROJ, Site.POST_NORM)]
        changes = {**dict.fromkeys(finer, torch.Tensor.float), (2, Site.POST_NORM): torch.Tensor.half}
        comparison = judge(copyist.device_run(changes))
        assert {site_of(comparison, layer, site).status for layer, site in finer} == {SiteStatus.PASS}
        (note,) = (note for note in comparison.notes if "float32" in note)
        assert note == "layers 0-1, q_proj, post_norm: shown in float32, where the golden holds bfloat16"
        reason = "dtype: expected torch.bfloat16, found torch.float16"
        assert site_of(comparison, 2, Site.POST_NORM).reason == reason
        assert (comparison.verdict, comparison.verdict.exit_code) == (Verdict.WARN, 0)
        headline = render_comparison(comparison, width=200).partition("\n")[0]
        assert headline == f"WARN: first at layer 2, post_norm: {reason}"

    def test_site_that_the_port_does_not_expose_is_not_compared(self, copyist: Any, judge: Judge) -> None:
        hidden = (Site.Q_ROPE, Site.K_ROPE)
        comparison = judge(copyist.device_run(not_exposed=hidden))
        assert comparison.verdict is Verdict.PASS
        compared = NUM_LAYERS * (NUM_SITES - len(hidden))
        assert (comparison.compared, comparison.of) == (compared, NUM_LAYERS * NUM_SITES)
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

    def test_missing_and_damaged_files_are_errors(self, copyist: Any, judge: Judge) -> None:
        target, reference = copyist.device_run(), copyist.golden()
        layer = target / "layer_2.safetensors"
        # Without the twin there is no other way of judging.
        for path in (layer, target / "inputs.safetensors", reference / "layer_1.fp32.safetensors"):
            held = path.read_bytes()
            path.unlink()
            with pytest.raises(CaptureError, match=re.escape(path.name)):
                judge(target, reference=reference)
            path.write_bytes(held)
        layer.write_bytes(layer.read_bytes()[:-1000])
        with pytest.raises(CaptureError, match=r"layer_2\.safetensors cannot be read"):
            judge(target, reference=reference)


class TestNonfinite:
    @pytest.mark.parametrize("bad", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
    def test_nan_on_a_real_row_fails_where_it_begins(self, bad: float, copyist: Any, judge: Judge) -> None:
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
        floats = [site for site in ModelGraph().sites if site not in (Site.INPUT, Site.ROUTER_EXPERTS)]
        changes: dict[tuple[int | None, Site], Any] = {}
        for site in floats:
            place = (1, slice(None), PADDING[1]) if site.has_heads_dim else PADDING
            changes |= {(layer, site): with_value(garbage, *place) for layer in range(NUM_LAYERS)}
        changes |= {(layer, Site.ROUTER_EXPERTS): with_value(0, *PADDING) for layer in range(NUM_LAYERS)}
        of_golden = {(1, site): with_value(math.nan, *PADDING) for site in (Site.MOE_DELTA, Site.POST_NORM)}
        found = judge(copyist.device_run(changes), reference=copyist.golden(of_golden))
        assert found.sites == judge(copyist.device_run(name="clean")).sites


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

    def test_faults_show_beside_flips_that_are_set_aside(self, copyist: Any, judge: Judge) -> None:
        order = torch.tensor([2, 0, 3, 1])
        changes = {
            # Weights that do not follow their experts.
            (0, Site.ROUTER_WEIGHTS): lambda weights: weights[..., order],
            **self.flip(copyist, 1, rank=0),
            **self.flip(copyist, 2, rank=-1),
            **self.flip(copyist, 3, rank=0),
            (3, Site.MOE_DELTA): scaled(0.9),
        }
        comparison = judge(copyist.device_run(changes))
        assert blamed(comparison) == [
            (0, ("router_weights",)),
            (2, ("router_experts",)),
            (3, ("moe_delta",)),
        ]
        assert "1 of 81 tokens chose other experts beyond noise" in comparison.blame[1].reason
        routing = site_of(comparison, 1, Site.ROUTER_EXPERTS).routing
        assert routing is not None
        assert (routing.num_tokens, routing.num_flipped, routing.num_explained) == (81, 1, 1)
        for site in (Site.MOE_DELTA, Site.OUTPUT):
            assert site_of(comparison, 1, site).num_set_aside == 1
        weights = site_of(comparison, 1, Site.ROUTER_WEIGHTS)
        assert (weights.num_set_aside, weights.num_replayed) == (0, 1)
        told = "not judged behind them: --model judges them against the golden with the port's own experts"
        assert any(told in note for note in comparison.notes)


class TestFloorKept:
    def test_statistics_judge_like_the_twin_and_estimate(self, copyist: Any, judge: Judge) -> None:
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
        # So they do with the model's head.
        run = full_run(NUM_LAYERS, sites_level="all")
        wrong_head = copyist.device_run({(None, ModelSite.LOGITS): scaled(0.9)}, run=run, name="head")
        comparison = judge(wrong_head, reference=reference)
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

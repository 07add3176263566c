"""Near ties: tokens whose experts noise may exchange are judged all the same, whatever the port shows of its choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.metrics.noise_floor import ROUTER_MARGIN
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS
from minimax_tools.reference.upcast import upcast_experts
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus

Judge = Callable[..., Comparison]

LAYER = 1
HIDDEN = tuple(site for site in Site if site not in (Site.INPUT, Site.OUTPUT))


def site_of(comparison: Comparison, site: Site) -> SiteResult:
    (found,) = [one for one in comparison.of_layer(LAYER) if one.site == site]
    return found


@pytest.fixture(scope="module")
def source(golden: Path) -> Capture:
    return Capture.open(golden)


@pytest.fixture(scope="module")
def tie(source: Capture) -> tuple[int, int]:
    """Row and position of the token whose choice of experts is the closest."""
    margin = source.read_floor(LAYER, ROUTER_MARGIN)
    assert margin is not None
    real = source.read_inputs().attention_mask.bool()
    closest = int(margin.masked_fill(~real, torch.inf).argmin())
    return closest // margin.shape[1], closest % margin.shape[1]


@pytest.fixture(scope="module")
def exchanged(source: Capture, toy: Path, tie: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [k] and the layer's output [H] of that token, its last expert exchanged for the next one."""
    twins = {site: source.read_twin(LAYER, site) for site in (Site.POST_NORM, Site.ROUTER_LOGITS)}
    states, logits = (twin[tie][None] for twin in twins.values() if twin is not None)
    with CheckpointWeights(model=str(toy)).open_layer(LAYER, source) as weights:
        k = weights.spec.num_experts_per_tok
        scores = logits.sigmoid()
        ranked = (scores + weights.tensors[CORRECTION_BIAS].float()).topk(k + 1, dim=-1).indices
        experts = torch.cat((ranked[:, : k - 1], ranked[:, k:]), dim=-1)
        shares = scores.gather(-1, experts)
        added = upcast_experts(weights.tensors, states, experts, shares / shares.sum(-1, keepdim=True))
    residual = source.read_twin(LAYER, Site.ATTN_RESIDUAL)
    assert residual is not None
    return experts[0], residual[tie] + added[0]


@pytest.fixture(scope="module")
def even(source: Capture, toy: Path, tie: tuple[int, int]) -> torch.Tensor:
    """Router logits [E] of that token, changed so that its last expert and the next one have one biased score."""
    logits = source.read(LAYER, Site.ROUTER_LOGITS)[tie].float()
    with CheckpointWeights(model=str(toy)).open_layer(LAYER, source) as weights:
        bias = weights.tensors[CORRECTION_BIAS].float()
        last, following = (logits.sigmoid() + bias).topk(weights.spec.num_experts_per_tok + 1).indices[-2:]
    score = logits[last].sigmoid() + bias[last] - bias[following]
    return logits.index_fill(0, following, float(score.logit()))


def put(place: tuple[int, int], value: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed[place] = value.to(tensor.dtype)
        return changed

    return change


class TestHiddenChoice:
    def test_right_port_that_chose_the_other_expert_passes_and_is_judged_there(
        self, copyist: Any, judge: Judge, toy: Path, tie: Any, exchanged: Any
    ) -> None:
        run = copyist.device_run({(LAYER, Site.OUTPUT): put(tie, exchanged[1])}, not_exposed=HIDDEN)
        output = site_of(judge(run, model=toy), Site.OUTPUT)
        assert (output.status, output.num_set_aside, output.num_replayed) == (SiteStatus.PASS, 0, 1)

    def test_wrong_values_of_such_a_token_fail(
        self, copyist: Any, judge: Judge, toy: Path, tie: Any, exchanged: Any
    ) -> None:
        wrong = 1.3 * exchanged[1]
        run = copyist.device_run({(LAYER, Site.OUTPUT): put(tie, wrong)}, not_exposed=HIDDEN)
        output = site_of(judge(run, model=toy), Site.OUTPUT)
        assert (output.status, output.num_set_aside) == (SiteStatus.FAIL, 0)
        assert output.noise is not None
        assert output.noise.worst_token == tie


class TestShownChoice:
    def test_choice_that_the_own_logits_do_not_give_fails(
        self, copyist: Any, judge: Judge, toy: Path, tie: Any, exchanged: Any
    ) -> None:
        run = copyist.device_run({(LAYER, Site.ROUTER_EXPERTS): put(tie, exchanged[0])})
        experts = site_of(judge(run, model=toy), Site.ROUTER_EXPERTS)
        assert experts.status is SiteStatus.FAIL
        row, position = tie
        assert "than the port's own logits and the checkpoint's correction bias give" in experts.reason
        assert f"row {row}, token {position}" in experts.reason

    def test_choice_that_agrees_with_rounded_logits_passes(
        self, copyist: Any, judge: Judge, toy: Path, tie: Any, exchanged: Any, even: torch.Tensor
    ) -> None:
        # What was rounded for output does not tell a choice that is this close.
        run = copyist.device_run(
            {
                (LAYER, Site.ROUTER_EXPERTS): put(tie, exchanged[0]),
                (LAYER, Site.ROUTER_LOGITS): lambda logits: put(tie, even)(logits).bfloat16().float(),
            }
        )
        assert site_of(judge(run, model=toy), Site.ROUTER_EXPERTS).status is SiteStatus.PASS

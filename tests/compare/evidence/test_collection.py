"""Evidence of real runs: which sites are looked at, and what is told of experts and next tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.comparer import JudgedRun, judge_run
from compare.evidence.collection import collect_evidence
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import sweep_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import SiteStatus


def judged(golden: Path, target: Path, model: Path | None = None, criteria: str = "noise") -> JudgedRun:
    return judge_run(
        Capture.open(golden),
        Capture.open(target),
        criteria=Criteria(name=criteria, rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        layer_pattern="layer_*",
        weights=None if model is None else CheckpointWeights(model=str(model)),
    )


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


def other_experts(experts: torch.Tensor) -> torch.Tensor:
    """The experts, with the first token's first one exchanged for one that it does not have."""
    changed = experts.clone()
    free = next(number for number in range(32) if number not in experts[0, 0].tolist())
    changed[0, 0, 0] = free
    return changed


def test_blamed_sites_are_shown_element_by_element(golden: Path, copyist: Any) -> None:
    target = copyist.device_run({(2, Site.MOE_DELTA): scaled(1.5), (1, Site.Q_ROPE): scaled(1.5)})
    found = collect_evidence(judged(golden, target))
    queries, errors = sorted(found.sites, key=lambda errors: str(errors.layer))
    assert (errors.layer, errors.site, errors.why) == (2, "moe_delta", "to blame")
    assert errors.has_twin
    assert "head" not in errors.worst[0].place
    assert errors.num_tokens == int(Capture.open(golden).read_inputs().attention_mask.sum())
    assert min(errors.picture.by_token) > 3.0
    assert found.notes == ()
    assert (queries.layer, queries.site) == (1, "q_rope")
    assert "(head " in queries.worst[0].place


def test_of_layers_with_one_mistake_the_worst_and_the_first_are_shown(golden: Path, copyist: Any) -> None:
    changes = {(layer, Site.MOE_DELTA): scaled(1.1 + 0.2 * layer) for layer in (0, 1, 2)}
    found = collect_evidence(judged(golden, copyist.device_run(changes)))
    assert [(errors.layer, errors.why) for errors in found.sites] == [
        (2, "to blame, the worst of 3 layers"),
        (0, "to blame, the first of 3 layers"),
    ]


def test_pass_shows_the_site_that_is_nearest_to_its_limit(golden: Path, copyist: Any) -> None:
    hidden = (Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS, Site.ROUTER_LOGITS)
    run = judged(golden, copyist.device_run(not_exposed=hidden))
    found = collect_evidence(run)
    (errors,) = found.sites
    assert errors.why == "nearest to its limit, and within it"
    excess = {(site.layer, site.site): site.nearest.excess for site in run.comparison.sites if site.nearest}
    assert excess[errors.layer, errors.site] == max(excess.values())
    # A port that hides its experts shows no routing.
    assert found.routing == ()


def test_site_of_another_shape_is_noted_and_not_shown(golden: Path, copyist: Any) -> None:
    target = copyist.device_run({(1, Site.ATTN_DELTA): lambda tensor: tensor[..., :-1].contiguous()})
    found = collect_evidence(judged(golden, target))
    assert found.sites == ()
    (note,) = found.notes
    assert note.startswith("layer 1, attn_delta: its errors cannot be shown element by element: shape")


def test_experts_of_every_layer_are_counted_on_both_sides(golden: Path, copyist: Any, toy: Path) -> None:
    target = copyist.device_run({(1, Site.ROUTER_EXPERTS): other_experts})
    found = collect_evidence(judged(golden, target, toy))
    assert [layer.layer for layer in found.routing] == [0, 1, 2, 3]
    right, wrong = found.routing[0], found.routing[1]
    assert right.golden_load == right.port_load
    assert len(right.golden_load) == 32
    assert right.flips == ()
    assert sum(wrong.golden_load) == sum(wrong.port_load)
    assert wrong.golden_load != wrong.port_load
    (flip,) = wrong.flips
    assert (flip.row, flip.position) == (0, 0)
    assert wrong.reach is not None
    assert flip.is_explained == (flip.margin <= wrong.reach)


def test_numbers_that_are_no_experts_are_not_counted(golden: Path, copyist: Any) -> None:
    def lost(experts: torch.Tensor) -> torch.Tensor:
        experts[0, 0, 0] = -1
        return experts

    run = replace(sweep_run(Span(1, 2), sites_level="all"), sites=(Site.INPUT, Site.ROUTER_EXPERTS))
    target = copyist.device_run({(1, Site.ROUTER_EXPERTS): lost}, run=run)
    (routing,) = collect_evidence(judged(golden, target)).routing
    assert sum(routing.port_load) == sum(routing.golden_load) - 1


def test_next_tokens_are_told_with_their_text_where_a_tokenizer_is(
    golden: Path, toy: Path, copyist: Any
) -> None:
    run = Capture.open(golden).description.run
    target = copyist.device_run({(None, ModelSite.LOGITS): scaled(0.5)}, run=run)
    with_text = collect_evidence(judged(golden, target, toy)).logits
    without = collect_evidence(judged(golden, target)).logits
    assert with_text is not None
    assert without is not None
    assert len(with_text.divergence) == len(with_text.rows) == len(with_text.foreseen)
    assert max(with_text.divergence) > 10 * max(with_text.foreseen)
    assert list(zip(with_text.rows, with_text.positions, strict=True)) == [
        *((0, position) for position in range(48)),
        *((1, position) for position in range(33)),
    ]
    assert (len(with_text.top), len(with_text.top[0].golden), len(with_text.top[0].port)) == (6, 5, 5)
    worst = with_text.top[0]
    assert worst.divergence == pytest.approx(max(with_text.divergence))
    assert (worst.row, worst.position) == max(
        zip(with_text.divergence, with_text.rows, with_text.positions, strict=True)
    )[1:]
    # Half the logits have the same order, and flatter chances.
    assert [one.token for one in worst.golden] == [one.token for one in worst.port]
    assert worst.golden[0].probability > worst.port[0].probability
    assert all(one.text for one in worst.golden)
    assert not any(one.text for one in without.top[0].golden)


def test_chained_layer_is_shown_on_the_port_s_own_input(
    golden: Path, runs: dict[str, Capture], toy: Path
) -> None:
    run = judged(golden, runs["swapped"].directory, toy)
    shown = {(errors.layer, errors.site): errors for errors in collect_evidence(run).sites}
    assert (1, "moe_delta") in shown
    result = next(site for site in run.comparison.of_layer(1) if site.site == "moe_delta")
    assert result.status is SiteStatus.FAIL
    assert result.noise is not None
    by_token = shown[1, "moe_delta"].picture.by_token
    ratio = (sum(value**2 for value in by_token) / len(by_token)) ** 0.5
    assert ratio == pytest.approx(result.noise.whole, rel=0.5)


def test_classic_criteria_can_be_reported_too(golden: Path, copyist: Any) -> None:
    target = copyist.device_run({(1, Site.OUTPUT): scaled(1.5)})
    found = collect_evidence(judged(golden, target, criteria="classic"))
    assert [(errors.layer, errors.site) for errors in found.sites] == [(1, "output")]

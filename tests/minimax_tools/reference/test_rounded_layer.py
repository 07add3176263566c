"""The rounded layer: exact copies are the float32 layer, rounded ones cost about what BF16 costs the golden."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.metrics.noise_floor import token_rows
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.evaluation import Float32Layer
from minimax_tools.reference.rounded_layer import RoundedLayer
from minimax_tools.reference.rounding import RoundingKind

LAYER = 2
KINDS = (RoundingKind.EXACT, RoundingKind.NEAREST, RoundingKind.RANDOM, RoundingKind.RANDOM)
VALUES = tuple(site for site in ModelGraph().sites if site not in (Site.INPUT, Site.ROUTER_EXPERTS))
Copy = dict[Site, torch.Tensor]


@pytest.fixture(scope="module")
def layer(spec: ModelSpec, open_layer: Any) -> RoundedLayer:
    return RoundedLayer(spec, open_layer(LAYER), kinds=KINDS, seed=LAYER)


@pytest.fixture(scope="module")
def copies(layer: RoundedLayer, capture: Capture, inputs: Inputs) -> tuple[Copy, ...]:
    experts = capture.read(LAYER, Site.ROUTER_EXPERTS)
    return layer.run(capture.read(LAYER, Site.INPUT), inputs, router_experts=experts)


def error(copy: Copy, exact: Copy, site: Site, inputs: Inputs) -> float:
    real = inputs.attention_mask.bool()
    mine, theirs = (token_rows(one[site], site)[real].double() for one in (exact, copy))
    return float((theirs - mine).norm() / mine.norm())


def test_exact_copy_is_the_float32_layer_and_others_stray_about_as_far_as_the_golden(
    spec: ModelSpec, open_layer: Any, capture: Capture, inputs: Inputs, copies: tuple[Copy, ...]
) -> None:
    exact, *others = copies
    own = Float32Layer(spec, open_layer(LAYER)).run(
        capture.read(LAYER, Site.INPUT),
        inputs,
        router_experts=capture.read(LAYER, Site.ROUTER_EXPERTS),
    )
    for site in VALUES:
        assert error(exact, own, site, inputs) < 2e-6, site
        golden = error({site: capture.read(LAYER, site).float()}, exact, site, inputs)
        for copy in others:
            assert 0.8 * golden < error(copy, exact, site, inputs) < 1.6 * golden, site


def test_nearest_copy_holds_bfloat16_numbers(copies: tuple[Copy, ...]) -> None:
    for site in VALUES:
        if site not in (Site.ROUTER_LOGITS, Site.ROUTER_WEIGHTS):
            assert torch.equal(copies[1][site], copies[1][site].bfloat16().float()), site


def test_random_copies_share_no_steps(copies: tuple[Copy, ...], inputs: Inputs) -> None:
    real = inputs.attention_mask.bool()
    errors = [(copy[Site.Q_PROJ] - copies[0][Site.Q_PROJ])[real].flatten() for copy in copies[2:]]
    assert abs(float(torch.corrcoef(torch.stack(errors))[0, 1])) < 0.1


def test_without_a_choice_all_replay_that_of_the_copy_that_rounds_to_nearest(
    layer: RoundedLayer, capture: Capture, inputs: Inputs
) -> None:
    exact, nearest, *_ = layer.run(capture.read(LAYER, Site.INPUT), inputs, router_experts=None)
    scores = exact[Site.ROUTER_LOGITS].sigmoid().gather(-1, nearest[Site.ROUTER_EXPERTS])
    assert torch.allclose(exact[Site.ROUTER_WEIGHTS], scores / scores.sum(-1, keepdim=True))


def test_padding_reaches_no_real_row(
    layer: RoundedLayer, capture: Capture, inputs: Inputs, copies: tuple[Copy, ...]
) -> None:
    padding = inputs.attention_mask == 0
    fed = capture.read(LAYER, Site.INPUT).masked_fill(padding[..., None], 7.0)
    others = layer.run(fed, inputs, router_experts=capture.read(LAYER, Site.ROUTER_EXPERTS))
    for mine, theirs in zip(copies[:2], others[:2], strict=True):
        assert torch.equal(mine[Site.OUTPUT][~padding], theirs[Site.OUTPUT][~padding])

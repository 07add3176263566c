"""Expert tokens: a golden's states for them reach every expert, and change nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import capture

from gpu_reference.golden.golden import GoldenRequest
from minimax_tools.capture.reader import Capture
from minimax_tools.metrics.noise_floor import ROUTER_MARGIN
from minimax_tools.model.inputs import ExpertTokens, pad_rows
from minimax_tools.model.run import single_layer_run
from minimax_tools.model.sites import Site

# Natural tokens, too few for the 32 experts of a layer, and as many expert tokens as have places for all.
ROWS = [[5, 9, 2, 7], [8, 1, *[3] * 8]]


@pytest.fixture(scope="module")
def request_of_few(ask: Any) -> GoldenRequest:
    inputs = pad_rows(ROWS, padding_side="right", buckets=(), pad_token_id=0, source="a test")
    request: GoldenRequest = ask(noise_floor="stats")
    return replace(request, inputs=replace(inputs, expert_tokens=ExpertTokens(row=1, count=8)))


@pytest.fixture(scope="module")
def golden(request_of_few: GoldenRequest, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return capture(request_of_few, tmp_path_factory.mktemp("golden"))


def test_every_expert_of_every_layer_is_chosen(golden: Capture) -> None:
    left_by_others = [len(golden.natural().unreached_experts(layer) or ()) for layer in golden.layers]
    assert min(left_by_others) > 8
    assert [golden.unreached_experts(layer) for layer in golden.layers] == [()] * 4


def test_they_choose_clearly(golden: Capture) -> None:
    is_made = golden.read_inputs().is_expert_token
    for layer in golden.layers:
        margin = golden.read_floor(layer, ROUTER_MARGIN)
        assert margin is not None
        assert float(margin[is_made].min()) > 0.01


def test_natural_tokens_have_the_values_of_a_golden_without_them(
    golden: Capture, request_of_few: GoldenRequest, tmp_path: Path
) -> None:
    natural = replace(request_of_few, inputs=request_of_few.inputs.natural())
    plain, view = capture(natural, tmp_path), golden.natural()
    is_real = view.read_inputs().attention_mask.bool()
    assert torch.equal(is_real, plain.read_inputs().attention_mask.bool())
    for layer in golden.layers:
        found, expected = (one.read(layer, Site.OUTPUT)[is_real].float() for one in (view, plain))
        assert torch.allclose(found, expected, rtol=2e-2, atol=2e-2)
    assert view.description.expert_tokens is None
    assert plain.unreached_experts(0) == view.unreached_experts(0)


def test_layer_alone_has_the_states_that_it_has_in_the_whole(
    golden: Capture, request_of_few: GoldenRequest, tmp_path: Path
) -> None:
    alone = capture(replace(request_of_few, run=single_layer_run(2, sites_level="all")), tmp_path)
    for site in Site:
        is_made = golden.read_inputs().is_expert_token
        if not site.has_heads_dim:
            assert torch.equal(alone.read(2, site)[is_made], golden.read(2, site)[is_made]), site

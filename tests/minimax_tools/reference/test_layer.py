from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.capture.recorder import Recorder, copy_to_host, shape_to_batch
from minimax_tools.capture.taps import Tap, verify_taps
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site, parse_site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expected_layer_shapes
from minimax_tools.reference.layer import ReferenceLayer

LAYERS = (0, 3)
# Layers of MiniMax-M2 have these.
TAPS = {
    site: Tap.parse(ReferenceLayer.sites[site])
    for site in ModelGraph().sites
    if site not in (Site.INPUT, Site.OUTPUT)
}


@pytest.fixture
def build(spec: ModelSpec, open_layer: Any) -> Any:
    """Builds the layer with a checkpoint's weights, in BF16 with a float32 router."""

    def make(layer: int) -> ReferenceLayer:
        module = ReferenceLayer(spec, layer)
        module.load_state_dict(dict(open_layer(layer)), assign=True)
        return module

    return make


def run(module: ReferenceLayer, states: torch.Tensor, inputs: Inputs) -> Mapping[Site, torch.Tensor]:
    with torch.no_grad(), Recorder(module, TAPS, keep=copy_to_host) as recorder:
        output = module(states, inputs.attention_mask, inputs.position_ids)
    recorded = {
        site: shape_to_batch(site, tensor, inputs.batch_shape) for site, tensor in recorder.tensors.items()
    }
    return {**recorded, Site.OUTPUT: output}


def test_parameters_bear_the_hubs_names_and_every_site_is_exposed(spec: ModelSpec) -> None:
    layer = ReferenceLayer(spec, 0)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes == dict(expected_layer_shapes(spec, 0))
    assert {parse_site(name): Tap.parse(text) for name, text in layer.sites.items()} == TAPS
    verify_taps(layer, TAPS)


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_gives_the_goldens_sites_to_its_rounding(
    build: Any, capture: Capture, inputs: Inputs, layer: int
) -> None:
    found = run(build(layer), capture.read(layer, Site.INPUT), inputs)
    real = inputs.attention_mask.bool()
    for site in (*TAPS, Site.OUTPUT):
        mine, golden = found[site], capture.read(layer, site)
        assert (mine.shape, mine.dtype) == (golden.shape, golden.dtype), site
        if site is Site.ROUTER_EXPERTS:
            flips = (mine.sort(-1).values != golden.sort(-1).values).any(-1) & real
            assert float(flips.sum() / real.sum()) < 0.1
        elif site not in (Site.ROUTER_WEIGHTS, Site.MOE_DELTA, Site.OUTPUT):
            if site.has_heads_dim:
                mine, golden = mine.transpose(1, 2), golden.transpose(1, 2)
            error = (mine[real].double() - golden[real].double()).norm() / golden[real].double().norm()
            assert float(error) < 0.01, site


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_neither_reaches_a_real_row_nor_makes_nan(build: Any, spec: ModelSpec, side: str) -> None:
    module = build(0).float()
    states = torch.randn(1, 6, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]] if side == "left" else [[1, 1, 1, 1, 0, 0]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    real = mask[0].bool()
    with torch.no_grad():
        padded = module(states, mask, positions)
        other = module(torch.where(mask[..., None].bool(), states, 7.0), mask, positions)
        alone = module(states[:, real], mask[:, real], positions[:, real])
    assert bool(padded.isfinite().all())
    torch.testing.assert_close(padded[:, real], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded[:, real], other[:, real], rtol=1e-5, atol=1e-5)


def test_later_tokens_do_not_reach_earlier_ones(build: Any, spec: ModelSpec) -> None:
    module = build(1).float()
    states = torch.randn(1, 5, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    mask, positions = torch.ones(1, 5, dtype=torch.int64), torch.arange(5)[None]
    changed = states.clone()
    changed[:, 3:] += 1.0
    with torch.no_grad():
        first, second = module(states, mask, positions), module(changed, mask, positions)
    torch.testing.assert_close(first[:, :3], second[:, :3])
    assert not torch.allclose(first[:, 3:], second[:, 3:])


def test_bias_chooses_experts_and_does_not_weigh_them(build: Any, spec: ModelSpec) -> None:
    module = build(0)
    logits = torch.zeros(1, spec.num_local_experts)
    logits[0, :4] = torch.tensor([3.0, 2.0, 1.0, 0.5])
    plain = module.block_sparse_moe.router(logits, torch.zeros(spec.num_local_experts))
    bias = torch.zeros(spec.num_local_experts)
    bias[-4:] = 9.0
    experts, weights = module.block_sparse_moe.router(logits, bias)
    assert sorted(plain[0][0].tolist()) == [0, 1, 2, 3]
    assert sorted(experts[0].tolist()) == [28, 29, 30, 31]
    torch.testing.assert_close(weights, torch.full((1, 4), 0.25))

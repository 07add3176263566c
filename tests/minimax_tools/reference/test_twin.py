from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.capture.recorder import Recorder, copy_to_host, shape_to_batch
from minimax_tools.capture.taps import Tap
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site, parse_site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expert_weight
from minimax_tools.reference.layer import ReferenceLayer
from minimax_tools.reference.modules import read_config, recording_layer
from minimax_tools.reference.twin import Float32Twin

LAYERS = (0, 3)
COMPUTED = tuple(site for site in ModelGraph().sites if site is not Site.INPUT)


@pytest.fixture(scope="module")
def config(toy: Path) -> Any:
    return read_config(toy, num_hidden_layers=4)


@pytest.fixture(scope="module")
def model(toy_bf16: Path) -> Any:
    """transformers' model whose every weight is the BF16 one, upcast."""
    from transformers import MiniMaxM2ForCausalLM

    return MiniMaxM2ForCausalLM.from_pretrained(toy_bf16, dtype=torch.float32).eval()


def relative_error(found: torch.Tensor, exact: torch.Tensor, real: torch.Tensor, site: Site) -> float:
    if site.has_heads_dim:
        found, exact = found.transpose(1, 2), exact.transpose(1, 2)
    return float((found[real].double() - exact[real].double()).norm() / exact[real].double().norm())


def run_in_float32(model: Any, layer: int, states: torch.Tensor, inputs: Inputs) -> dict[Site, torch.Tensor]:
    from transformers.masking_utils import create_causal_mask

    states = states.float()
    mask = create_causal_mask(
        model.config, states, inputs.attention_mask, None, position_ids=inputs.position_ids
    )
    module = model.model.layers[layer]
    recording = recording_layer(
        module, sites=ModelGraph().sites, graph=ModelGraph().layer(0), attn_implementation="sdpa"
    )
    with torch.no_grad(), recording as tensors:
        module(
            states,
            attention_mask=mask,
            position_ids=inputs.position_ids,
            position_embeddings=model.model.rotary_emb(states, position_ids=inputs.position_ids),
        )
    return {site: shape_to_batch(site, tensor, inputs.batch_shape) for site, tensor in tensors.items()}


Make = Callable[[int], Float32Twin]


@pytest.fixture(scope="module")
def make_twin(config: Any, open_layer: Any, toy: Path) -> Make:
    options: dict[str, Any] = {"spec": ModelSpec.from_folder(toy), "device": torch.device("cpu")}
    return lambda layer: Float32Twin(config, open_layer(layer), layer=layer, **options)


@pytest.mark.parametrize("layer", LAYERS)
def test_twin_is_transformers_layer_in_float32(
    make_twin: Make, model: Any, capture: Capture, inputs: Inputs, layer: int
) -> None:
    states, real = capture.read(layer, Site.INPUT), inputs.attention_mask.bool()
    exact = run_in_float32(model, layer, states, inputs)
    twin = make_twin(layer).run(states, inputs, router_experts=None, sites=COMPUTED)
    assert tuple(twin) == COMPUTED
    assert torch.equal(twin[Site.ROUTER_EXPERTS][real], exact[Site.ROUTER_EXPERTS][real])
    for site in COMPUTED:
        assert relative_error(twin[site], exact[site], real, site) <= 1e-5, site


@pytest.mark.parametrize("layer", LAYERS)
def test_twin_is_the_reference_layer_in_float32(
    make_twin: Make, open_layer: Any, spec: ModelSpec, capture: Capture, inputs: Inputs, layer: int
) -> None:
    states, real = capture.read(layer, Site.INPUT), inputs.attention_mask.bool()
    module = ReferenceLayer(spec, layer)
    module.load_state_dict({name: tensor.float() for name, tensor in open_layer(layer).items()})
    taps = {parse_site(name): Tap.parse(text) for name, text in module.sites.items()}
    with torch.no_grad(), Recorder(module, taps, keep=copy_to_host) as recorder:
        output = module(states.float(), inputs.attention_mask, inputs.position_ids)
    exact = {
        site: shape_to_batch(site, tensor, inputs.batch_shape) for site, tensor in recorder.tensors.items()
    }
    twin = make_twin(layer).run(states, inputs, router_experts=None, sites=COMPUTED)
    # Both choose the same set; the order of a choice is free.
    mine, order = twin.pop(Site.ROUTER_EXPERTS).sort(-1)
    theirs, their_order = exact.pop(Site.ROUTER_EXPERTS).sort(-1)
    assert torch.equal(mine[real], theirs[real])
    twin[Site.ROUTER_WEIGHTS] = twin[Site.ROUTER_WEIGHTS].gather(-1, order)
    exact[Site.ROUTER_WEIGHTS] = exact[Site.ROUTER_WEIGHTS].gather(-1, their_order)
    for site, tensor in {**exact, Site.OUTPUT: output}.items():
        assert relative_error(twin[site], tensor, real, site) <= 1e-5, site


def test_twin_that_chooses_as_the_reference_did_is_not_changed_by_the_replay(
    make_twin: Make, capture: Capture, inputs: Inputs
) -> None:
    twin, states = make_twin(1), capture.read(1, Site.INPUT)
    free = twin.run(states, inputs, router_experts=None, sites=COMPUTED)
    replayed = twin.run(states, inputs, router_experts=free[Site.ROUTER_EXPERTS], sites=COMPUTED)
    for site in COMPUTED:
        torch.testing.assert_close(replayed[site], free[site], rtol=1e-6, atol=1e-7)
    # Only the sites that are asked for come back.
    sites = (Site.K_ROPE, Site.OUTPUT)
    assert tuple(twin.run(states, inputs, router_experts=None, sites=sites)) == sites


def test_replayed_experts_compute_with_the_weights_of_the_twins_own_scores(
    make_twin: Make, open_layer: Any, capture: Capture, inputs: Inputs, spec: ModelSpec
) -> None:
    layer, k = 2, spec.num_experts_per_tok
    states, twin = capture.read(layer, Site.INPUT), make_twin(layer)
    # The last of all experts instead of the chosen ones.
    shape = (inputs.batch_size, inputs.sequence_length, k)
    chosen = torch.arange(spec.num_local_experts - k, spec.num_local_experts).expand(shape)
    replayed = twin.run(states, inputs, router_experts=chosen, sites=COMPUTED)
    free = twin.run(states, inputs, router_experts=None, sites=COMPUTED)
    assert torch.equal(replayed[Site.ROUTER_EXPERTS], free[Site.ROUTER_EXPERTS])
    assert torch.equal(replayed[Site.POST_NORM], free[Site.POST_NORM])
    scores = replayed[Site.ROUTER_LOGITS].sigmoid()[..., -k:]
    expected = scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(replayed[Site.ROUTER_WEIGHTS], expected, rtol=1e-6, atol=0)
    tensors, rows = open_layer(layer), replayed[Site.POST_NORM].double()
    exact = torch.zeros_like(rows)
    for place, expert in enumerate(range(spec.num_local_experts - k, spec.num_local_experts)):
        gate, up, down = (tensors[expert_weight(expert, name)].double() for name in ("w1", "w3", "w2"))
        hidden = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
        exact += expected[..., place, None].double() * (hidden @ down.T)
    error = (replayed[Site.MOE_DELTA].double() - exact).norm() / exact.norm()
    assert float(error) <= 1e-5
    assert not torch.allclose(replayed[Site.MOE_DELTA], free[Site.MOE_DELTA])


@pytest.mark.parametrize("layer", LAYERS)
def test_golden_twin_replays_the_goldens_own_choice(capture: Capture, layer: int) -> None:
    logits, weights = (capture.read_twin(layer, site) for site in (Site.ROUTER_LOGITS, Site.ROUTER_WEIGHTS))
    assert logits is not None
    assert weights is not None
    scores = logits.sigmoid().gather(-1, capture.read(layer, Site.ROUTER_EXPERTS))
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True), rtol=1e-6, atol=0)


def test_config_of_the_golden_is_left_alone(config: Any, make_twin: Make) -> None:
    before = (config.to_dict(), config._attn_implementation, config._experts_implementation)
    make_twin(0)
    assert (config.to_dict(), config._attn_implementation, config._experts_implementation) == before

"""The golden's sites where they are exact: shapes, sums, rotation, the router and what frames the layers.

Certification computes all others from the sites before them; the reference layer's tests do too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    EMBEDDING,
    FINAL_NORM,
    GATE,
    LM_HEAD,
    layer_prefix,
)

LAYERS = range(4)
ROUNDING = 2.0**-8  # of BF16: half a unit in the last place is this much of a value


@pytest.fixture(scope="module")
def capture(golden: Path) -> Capture:
    return Capture.open(golden)


@pytest.fixture(scope="module")
def inputs(capture: Capture) -> Inputs:
    return capture.read_inputs()


@pytest.fixture(scope="module")
def spec(toy: Path) -> ModelSpec:
    return ModelSpec.from_folder(toy)


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def heads_of(flat: torch.Tensor, head_dim: int) -> torch.Tensor:
    return flat.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def test_all_18_sites_have_the_shapes_and_dtypes_of_the_design(capture: Capture, layer: int) -> None:
    hidden, queries, keys = (2, 48, 256), (2, 48, 8 * 64), (2, 48, 2 * 64)
    of_hidden = (
        *(Site.INPUT, Site.INPUT_NORM, Site.ATTN_DELTA, Site.ATTN_RESIDUAL),
        *(Site.POST_NORM, Site.MOE_DELTA, Site.OUTPUT),
    )
    shapes = {
        **dict.fromkeys(of_hidden, hidden),
        **dict.fromkeys((Site.Q_PROJ, Site.Q_NORM, Site.ATTN_CONTEXT), queries),
        **dict.fromkeys((Site.K_PROJ, Site.V_PROJ, Site.K_NORM), keys),
        Site.Q_ROPE: (2, 8, 48, 64),
        Site.K_ROPE: (2, 2, 48, 64),
        Site.ROUTER_LOGITS: (2, 48, 32),
        Site.ROUTER_EXPERTS: (2, 48, 4),
        Site.ROUTER_WEIGHTS: (2, 48, 4),
    }
    router = {
        Site.ROUTER_LOGITS: torch.float32,
        Site.ROUTER_WEIGHTS: torch.float32,
        Site.ROUTER_EXPERTS: torch.int64,
    }
    tensors = {site: capture.read(layer, site) for site in capture.sites(layer)}
    assert len(tensors) == 18
    assert {site: tuple(tensor.shape) for site, tensor in tensors.items()} == shapes
    assert {site: tensor.dtype for site, tensor in tensors.items()} == {
        site: router.get(site, torch.bfloat16) for site in ModelGraph().sites
    }


def test_residual_stream_adds_up_bit_for_bit(capture: Capture, layer: int) -> None:
    residual = capture.read(layer, Site.INPUT) + capture.read(layer, Site.ATTN_DELTA)
    assert torch.equal(capture.read(layer, Site.ATTN_RESIDUAL), residual)
    assert torch.equal(capture.read(layer, Site.OUTPUT), residual + capture.read(layer, Site.MOE_DELTA))


@pytest.mark.parametrize(("site", "source"), [(Site.Q_ROPE, Site.Q_NORM), (Site.K_ROPE, Site.K_NORM)])
def test_rope_turns_the_first_dims_of_each_head_and_no_others(
    capture: Capture, inputs: Inputs, spec: ModelSpec, layer: int, site: Site, source: Site
) -> None:
    width, half = spec.rotary_dim, spec.rotary_dim // 2
    before, after = heads_of(capture.read(layer, source), spec.head_dim), capture.read(layer, site)
    powers = torch.arange(0, width, 2, dtype=torch.float32) / width
    angles = inputs.position_ids[:, None, :, None].float() * (1.0 / spec.rope_theta**powers)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    first, second = before[..., :half], before[..., half:width]
    assert torch.equal(after[..., :half], first * cos - second * sin)
    assert torch.equal(after[..., half:width], second * cos + first * sin)
    assert torch.equal(after[..., width:], before[..., width:])
    assert not torch.equal(after[..., :half], first)


def test_router_scores_in_float32_and_chooses_by_biased_scores(
    capture: Capture, toy: Path, spec: ModelSpec, layer: int
) -> None:
    with CheckpointReader(toy) as reader:
        gate, bias = (reader.read(layer_prefix(layer) + name) for name in (GATE, CORRECTION_BIAS))
    logits = capture.read(layer, Site.ROUTER_LOGITS)
    exact = capture.read(layer, Site.POST_NORM).double() @ gate.double().T
    assert relative_error(logits, exact) < 1e-6
    experts = capture.read(layer, Site.ROUTER_EXPERTS)
    scores = logits.sigmoid()
    chosen = (scores + bias).topk(spec.num_experts_per_tok).indices
    assert torch.equal(experts.sort(-1).values, chosen.sort(-1).values)
    unbiased = scores.gather(-1, experts)
    expected = unbiased / unbiased.sum(-1, keepdim=True)
    torch.testing.assert_close(capture.read(layer, Site.ROUTER_WEIGHTS), expected, rtol=1e-6, atol=0)


def test_embedding_final_norm_and_logits_frame_the_layers(
    capture: Capture, inputs: Inputs, toy: Path, spec: ModelSpec
) -> None:
    with CheckpointReader(toy) as reader:
        embedding, norm, head = (reader.read(name) for name in (EMBEDDING, FINAL_NORM, LM_HEAD))
    assert torch.equal(capture.read(None, ModelSite.EMBEDDING), embedding[inputs.input_ids])
    normed, states = capture.read(None, ModelSite.FINAL_NORM), capture.read(3, Site.OUTPUT).double()
    root = (states.square().mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt()
    assert relative_error(normed, states / root * norm.double()) < ROUNDING
    assert relative_error(capture.read(None, ModelSite.LOGITS), normed.double() @ head.double().T) < ROUNDING

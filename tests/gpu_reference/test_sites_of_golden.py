"""The golden's sites, each computed by hand from the sites before it and the checkpoint's weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    EMBEDDING,
    FINAL_NORM,
    GATE,
    INPUT_NORM,
    K_NORM,
    K_PROJ,
    LM_HEAD,
    O_PROJ,
    POST_NORM,
    Q_NORM,
    Q_PROJ,
    V_PROJ,
    expert_weight,
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


@pytest.fixture(scope="module")
def reader(toy: Path) -> Iterator[CheckpointReader]:
    with CheckpointReader(toy) as reader:
        yield reader


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def weights(reader: CheckpointReader, spec: ModelSpec, layer: int) -> LayerTensors:
    return LayerTensors.open(reader, spec, layer, torch.bfloat16)


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    exact = states.double()
    return exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def heads_of(flat: torch.Tensor, head_dim: int) -> torch.Tensor:
    return flat.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def test_all_18_sites_have_the_shapes_of_the_design(capture: Capture, layer: int) -> None:
    batch, sequence, hidden, heads, kv_heads, dim, experts, k = 2, 48, 256, 8, 2, 64, 32, 4
    expected = {
        Site.INPUT: (batch, sequence, hidden),
        Site.INPUT_NORM: (batch, sequence, hidden),
        Site.Q_PROJ: (batch, sequence, heads * dim),
        Site.K_PROJ: (batch, sequence, kv_heads * dim),
        Site.V_PROJ: (batch, sequence, kv_heads * dim),
        Site.Q_NORM: (batch, sequence, heads * dim),
        Site.K_NORM: (batch, sequence, kv_heads * dim),
        Site.Q_ROPE: (batch, heads, sequence, dim),
        Site.K_ROPE: (batch, kv_heads, sequence, dim),
        Site.ATTN_CONTEXT: (batch, sequence, heads * dim),
        Site.ATTN_DELTA: (batch, sequence, hidden),
        Site.ATTN_RESIDUAL: (batch, sequence, hidden),
        Site.POST_NORM: (batch, sequence, hidden),
        Site.ROUTER_LOGITS: (batch, sequence, experts),
        Site.ROUTER_EXPERTS: (batch, sequence, k),
        Site.ROUTER_WEIGHTS: (batch, sequence, k),
        Site.MOE_DELTA: (batch, sequence, hidden),
        Site.OUTPUT: (batch, sequence, hidden),
    }
    assert {site: tuple(capture.read(layer, site).shape) for site in capture.sites(layer)} == expected
    assert len(expected) == 18


def test_router_is_float32_and_the_rest_bfloat16(capture: Capture, layer: int) -> None:
    dtypes = {site: capture.read(layer, site).dtype for site in Site}
    router = {
        Site.ROUTER_LOGITS: torch.float32,
        Site.ROUTER_WEIGHTS: torch.float32,
        Site.ROUTER_EXPERTS: torch.int64,
    }
    assert dtypes == {site: router.get(site, torch.bfloat16) for site in Site}


def test_residual_stream_adds_up_bit_for_bit(capture: Capture, layer: int) -> None:
    residual = capture.read(layer, Site.INPUT) + capture.read(layer, Site.ATTN_DELTA)
    assert torch.equal(capture.read(layer, Site.ATTN_RESIDUAL), residual)
    assert torch.equal(capture.read(layer, Site.OUTPUT), residual + capture.read(layer, Site.MOE_DELTA))


@pytest.mark.parametrize(
    ("site", "source", "name"),
    [
        (Site.INPUT_NORM, Site.INPUT, INPUT_NORM),
        (Site.Q_NORM, Site.Q_PROJ, Q_NORM),
        (Site.K_NORM, Site.K_PROJ, K_NORM),
        (Site.POST_NORM, Site.ATTN_RESIDUAL, POST_NORM),
    ],
)
def test_norms_span_the_whole_width(
    capture: Capture,
    weights: LayerTensors,
    spec: ModelSpec,
    layer: int,
    site: Site,
    source: Site,
    name: str,
) -> None:
    exact = rms_norm(capture.read(layer, source), weights[name], spec.rms_norm_eps)
    assert relative_error(capture.read(layer, site), exact) < ROUNDING


@pytest.mark.parametrize(
    ("site", "source", "name"),
    [
        (Site.Q_PROJ, Site.INPUT_NORM, Q_PROJ),
        (Site.K_PROJ, Site.INPUT_NORM, K_PROJ),
        (Site.V_PROJ, Site.INPUT_NORM, V_PROJ),
        (Site.ATTN_DELTA, Site.ATTN_CONTEXT, O_PROJ),
    ],
)
def test_projections_are_the_weights_times_their_input(
    capture: Capture, weights: LayerTensors, layer: int, site: Site, source: Site, name: str
) -> None:
    exact = capture.read(layer, source).double() @ weights[name].double().T
    assert relative_error(capture.read(layer, site), exact) < ROUNDING


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


def test_context_is_causal_attention_over_real_keys(
    capture: Capture, inputs: Inputs, spec: ModelSpec, layer: int
) -> None:
    query, key = capture.read(layer, Site.Q_ROPE).double(), capture.read(layer, Site.K_ROPE).double()
    value = heads_of(capture.read(layer, Site.V_PROJ), spec.head_dim).double()
    groups = spec.num_attention_heads // spec.num_key_value_heads
    length = inputs.sequence_length
    for row in range(inputs.batch_size):
        for head in range(spec.num_attention_heads):
            scores = query[row, head] @ key[row, head // groups].T / spec.head_dim**0.5
            visible = torch.ones(length, length).tril().bool() & inputs.attention_mask[row].bool()
            exact = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value[row, head // groups]
            found = capture.read(layer, Site.ATTN_CONTEXT)[row].unflatten(-1, (-1, spec.head_dim))[:, head]
            real = inputs.attention_mask[row].bool()
            assert relative_error(found[real], exact[real]) < 2 * ROUNDING


def test_router_scores_in_float32_and_chooses_by_biased_scores(
    capture: Capture, weights: LayerTensors, spec: ModelSpec, layer: int
) -> None:
    logits = capture.read(layer, Site.ROUTER_LOGITS)
    exact = capture.read(layer, Site.POST_NORM).double() @ weights[GATE].double().T
    assert relative_error(logits, exact) < 1e-6
    experts = capture.read(layer, Site.ROUTER_EXPERTS)
    scores = logits.sigmoid()
    chosen = (scores + weights[CORRECTION_BIAS]).topk(spec.num_experts_per_tok).indices
    assert torch.equal(experts.sort(-1).values, chosen.sort(-1).values)
    unbiased = scores.gather(-1, experts)
    expected = unbiased / unbiased.sum(-1, keepdim=True)
    torch.testing.assert_close(capture.read(layer, Site.ROUTER_WEIGHTS), expected, rtol=1e-6, atol=0)


def test_moe_delta_is_the_weighted_sum_of_the_chosen_experts(
    capture: Capture, weights: LayerTensors, spec: ModelSpec, layer: int
) -> None:
    states = capture.read(layer, Site.POST_NORM).double().flatten(0, 1)
    experts = capture.read(layer, Site.ROUTER_EXPERTS).flatten(0, 1)
    shares = capture.read(layer, Site.ROUTER_WEIGHTS).double().flatten(0, 1)
    exact = torch.zeros_like(states)
    for expert in range(spec.num_local_experts):
        gate, up, down = (weights[expert_weight(expert, name)].double() for name in ("w1", "w3", "w2"))
        share = (shares * (experts == expert)).sum(-1, keepdim=True)
        exact += share * ((torch.nn.functional.silu(states @ gate.T) * (states @ up.T)) @ down.T)
    assert relative_error(capture.read(layer, Site.MOE_DELTA).flatten(0, 1), exact) < 2 * ROUNDING


def test_embedding_final_norm_and_logits_frame_the_layers(
    capture: Capture, inputs: Inputs, reader: CheckpointReader, spec: ModelSpec
) -> None:
    embedding, norm, head = (reader.read(name) for name in (EMBEDDING, FINAL_NORM, LM_HEAD))
    assert torch.equal(capture.read(None, ModelSite.EMBEDDING), embedding[inputs.input_ids])
    normed = capture.read(None, ModelSite.FINAL_NORM)
    exact = rms_norm(capture.read(LAYERS[-1], Site.OUTPUT), norm, spec.rms_norm_eps)
    assert relative_error(normed, exact) < ROUNDING
    assert relative_error(capture.read(None, ModelSite.LOGITS), normed.double() @ head.double().T) < ROUNDING

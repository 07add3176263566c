"""Properties of a synthetic model's numbers, measured on transformers' model with each layer's own input."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch

from gpu_reference.model.model import restore_router
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

transformers = pytest.importorskip("transformers", reason="the extra golden is not installed")

MODEL = SyntheticModel(num_hidden_layers=8)
NUM_TOKENS = 96

Model = Any
Layer = Any


class LayerRun(NamedTuple):
    """Float32 tensors of one layer: [S,H], router_logits [S,E], experts [S,k], probabilities [N,S,S]."""

    input: torch.Tensor
    attn_delta: torch.Tensor
    probabilities: torch.Tensor
    router_logits: torch.Tensor
    experts: torch.Tensor
    moe_delta: torch.Tensor


@pytest.fixture(scope="module", params=[0, 1], ids=["seed 0", "seed 1"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("weights") / "toy"
    synthesize(folder, model=MODEL, dtype=torch.float8_e4m3fn, shard_size_bytes=None, seed=int(request.param))
    return load(folder)


@pytest.fixture(scope="module")
def inputs(model: Model) -> list[torch.Tensor]:
    ids = torch.randint(0, MODEL.vocab_size, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return list(model(ids, output_hidden_states=True).hidden_states[: MODEL.num_hidden_layers])


@pytest.fixture(scope="module")
def runs(model: Model, inputs: list[torch.Tensor]) -> list[LayerRun]:
    rotary = model.model.rotary_emb
    return [run(layer, rotary, hidden) for layer, hidden in zip(model.model.layers, inputs, strict=True)]


def load(folder: Path) -> Model:
    settings = transformers.FineGrainedFP8Config(dequantize=True)
    model, loading = transformers.MiniMaxM2ForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=settings,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(loading.values()), loading
    with CheckpointReader(folder) as reader:
        restore_router(model, reader, MODEL.spec())
    assert model.model.layers[0].mlp.gate.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.e_score_correction_bias.dtype == torch.float32
    return model.eval()


def run(layer: Layer, rotary: Any, hidden: torch.Tensor) -> LayerRun:
    seen: dict[str, Any] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
        for name, module in (("attention", layer.self_attn), ("moe", layer.mlp), ("router", layer.mlp.gate))
    ]
    length = hidden.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)[None, None]
    with torch.no_grad():
        rotation = rotary(hidden, positions)
        layer(hidden, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
    for hook in hooks:
        hook.remove()
    return LayerRun(
        input=hidden[0].float(),
        attn_delta=seen["attention"][0][0].float(),
        probabilities=seen["attention"][1][0].float(),
        router_logits=seen["router"][0].float(),
        experts=seen["router"][2],
        moe_delta=seen["moe"][0].float(),
    )


def changed_share(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.sort(-1).values != second.sort(-1).values).any(-1).float().mean())


def choose(layer: Layer, logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.topk(logits.sigmoid() + bias, layer.mlp.gate.top_k, dim=-1).indices


def test_deltas_are_a_tenth_to_a_third_of_the_stream_which_grows(runs: list[LayerRun]) -> None:
    for one in runs:
        assert 0.08 < one.attn_delta.norm() / one.input.norm() < 0.3
        assert 0.05 < one.moe_delta.norm() / one.input.norm() < 0.2
    norms = [float(one.input.norm()) for one in runs]
    assert all(1.0 < later / earlier < 1.3 for earlier, later in pairwise(norms))


def test_the_same_two_channels_are_massive_in_every_layer(runs: list[LayerRun]) -> None:
    channels = set()
    for one in runs:
        size = one.input.square().mean(0).sqrt()
        ratios, order = (size / size.median()).sort(descending=True)
        assert 12 < ratios[1] <= ratios[0] < 50
        assert ratios[2] < 4
        channels.add(tuple(sorted(order[:2].tolist())))
        assert all(one.input[:, channel].sign().unique().numel() == 1 for channel in order[:2].tolist())
    assert len(channels) == 1


def test_attention_is_far_from_uniform_and_heads_differ(runs: list[LayerRun]) -> None:
    latter_half = slice(NUM_TOKENS // 2, None)
    uniform = torch.arange(1, NUM_TOKENS + 1).log()[latter_half].mean()
    for one in runs:
        entropy = -(one.probabilities * (one.probabilities + 1e-9).log()).sum(-1)[:, latter_half].mean(-1)
        assert 0.2 < (entropy / uniform).mean() < 0.8
        assert entropy.max() - entropy.min() > 0.1 * uniform


def test_norm_weights_are_spread_over_heads(model: Model) -> None:
    for layer in model.model.layers:
        heads = layer.self_attn.q_norm.weight.float().view(MODEL.num_attention_heads, -1).mean(1)
        assert heads.std() / heads.mean() > 0.1


def test_tokens_spread_over_the_experts(runs: list[LayerRun]) -> None:
    for one in runs:
        share = torch.bincount(one.experts.flatten(), minlength=MODEL.num_local_experts) / NUM_TOKENS
        assert (share > 0).sum() > 0.8 * MODEL.num_local_experts
        assert share.max() < 0.8
        assert 1.0 < one.router_logits.std() < 2.5


def test_correction_bias_lies_between_8_and_9_5_and_decides(model: Model, runs: list[LayerRun]) -> None:
    without, rounded = [], []
    for layer, one in zip(model.model.layers, runs, strict=True):
        bias = layer.mlp.e_score_correction_bias
        assert 8.0 <= bias.min() < bias.max() <= 9.5
        assert bias.std() > 0.05
        assert changed_share(choose(layer, one.router_logits, bias), one.experts) == 0
        without.append(changed_share(choose(layer, one.router_logits, bias * 0), one.experts))
        rounded_bias = bias.bfloat16().float()
        rounded.append(changed_share(choose(layer, one.router_logits, rounded_bias), one.experts))
    assert min(without) > 0.5
    assert 0.1 < fmean(rounded) < 0.5


def test_bfloat16_arithmetic_alone_turns_few_expert_choices(
    model: Model, inputs: list[torch.Tensor], runs: list[LayerRun]
) -> None:
    flips = []
    for layer, hidden, one in zip(model.model.layers, inputs, runs, strict=True):
        exact = run(copy.deepcopy(layer).float(), model.model.rotary_emb, hidden.float())
        flips.append(changed_share(one.experts, exact.experts))
        assert (one.attn_delta - exact.attn_delta).norm() / exact.attn_delta.norm() < 0.02
    assert 0.001 < fmean(flips) < 0.05


def test_logits_tell_tokens_apart_without_being_certain(model: Model) -> None:
    ids = torch.arange(NUM_TOKENS)[None] * 5
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    assert 1.5 < logits.std() < 5
    assert logits.argmax(-1).unique().numel() > NUM_TOKENS / 4

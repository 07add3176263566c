from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.golden.golden import Golden, GoldenRequest, open_golden
from gpu_reference.golden.recording import recording_layers, recording_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import GoldenRefusedError
from minimax_tools.model.run import single_layer_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.weight_names import CORRECTION_BIAS, GATE, layer_prefix


def ignore(layer: int, tensors: Mapping[Site, torch.Tensor], device: torch.device) -> None:
    """A sink that drops everything."""


def recorded_logits(golden: Golden, request: GoldenRequest) -> torch.Tensor:
    layers = tuple(request.run.span)
    with (
        recording_layers(golden.model, layers, sites=frozenset(Site), inputs=request.inputs, sink=ignore),
        recording_model(golden.model, tuple(ModelSite)),
    ):
        return golden.forward()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_recording_every_site_leaves_the_logits_bit_equal(ask: Any, implementation: str) -> None:
    request = ask(attn_implementation=implementation)
    with open_golden(request) as golden:
        plain = golden.forward()
        recorded = recorded_logits(golden, request)
        assert torch.equal(recorded, plain)
        assert torch.equal(golden.forward(), plain)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_golden_is_transformers_own_model_with_a_float32_router(
    ask: Any, toy_bf16: Path, implementation: str
) -> None:
    from transformers import MiniMaxM2ForCausalLM

    request = ask(attn_implementation=implementation)
    model = MiniMaxM2ForCausalLM.from_pretrained(
        toy_bf16,
        dtype=torch.bfloat16,
        attn_implementation=implementation,
        experts_implementation="grouped_mm",
    ).eval()
    with CheckpointReader(toy_bf16) as reader:
        for index, layer in enumerate(model.model.layers):
            gate, bias = (reader.read(layer_prefix(index) + name) for name in (GATE, CORRECTION_BIAS))
            layer.mlp.gate.weight = torch.nn.Parameter(gate)
            layer.mlp.e_score_correction_bias = bias
    with torch.no_grad():
        expected = model(**request.inputs.tensors(), use_cache=False).logits
    with open_golden(request) as golden:
        assert torch.equal(golden.forward(), expected)


def test_no_hook_stays_on_the_model(ask: Any) -> None:
    request = ask()
    with open_golden(request) as golden:
        recorded_logits(golden, request)
        left = [
            name
            for name, module in golden.model.named_modules()
            if module._forward_hooks or module._forward_pre_hooks
        ]
    assert left == []


def test_layer_is_handed_over_before_the_next_runs(ask: Any) -> None:
    request = ask()
    events = []
    with open_golden(request) as golden:
        for layer in request.run.span:
            golden.model.get_submodule(f"model.layers.{layer}").register_forward_pre_hook(
                lambda *_, layer=layer: events.append(f"run {layer}")
            )
        with recording_layers(
            golden.model,
            (1, 2),
            sites=frozenset((Site.OUTPUT,)),
            inputs=request.inputs,
            sink=lambda layer, tensors, device: events.append(f"hand {layer}"),
        ):
            golden.forward()
    assert events == ["run 0", "run 1", "hand 1", "run 2", "hand 2", "run 3"]


def test_layer_that_does_not_show_a_site_is_refused(ask: Any) -> None:
    with open_golden(ask()) as golden:
        # As a transformers whose MoE block has no gate of its own.
        golden.model.get_submodule("model.layers.1.mlp").forward = lambda states: states
        with pytest.raises(
            GoldenRefusedError, match="layer 1 of transformers' model does not show router_logits"
        ):
            golden.run()


def test_run_without_logits_computes_those_of_the_last_position_alone(ask: Any) -> None:
    with open_golden(ask(run=single_layer_run(0, sites_level="layer"))) as golden:
        assert golden.forward().shape == (2, 1, 512)

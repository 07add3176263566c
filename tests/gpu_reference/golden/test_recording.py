from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import capture

from compare.cli import main as mm2_compare
from gpu_reference.golden.golden import Golden, GoldenRequest, open_golden
from gpu_reference.golden.recording import recording_layers, recording_model
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import GoldenRefusedError
from minimax_tools.metrics.noise_floor import ROUTER_MARGIN
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.inputs import ExpertTokens, pad_rows
from minimax_tools.model.run import single_layer_run
from minimax_tools.model.sites import ModelSite, Site


def recorded_logits(golden: Golden, request: GoldenRequest) -> torch.Tensor:
    """The logits of a forward that is recorded at every site, for nobody."""
    options: dict[str, Any] = {
        "sites": frozenset(ModelGraph().sites),
        "inputs": request.inputs,
        "graph": request.model.spec.graph,
    }
    with (
        recording_layers(golden.model, tuple(request.run.span), sink=lambda *_: None, **options),
        recording_model(golden.model, tuple(ModelSite)),
    ):
        return golden.forward()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_recorded_golden_is_transformers_own_model_with_a_float32_router(
    ask: Any, toy_bf16: Path, load_with_float32_router: Any, implementation: str
) -> None:
    request = ask(attn_implementation=implementation)
    model = load_with_float32_router(
        toy_bf16, attn_implementation=implementation, experts_implementation="grouped_mm"
    )
    with torch.no_grad():
        expected = model(**request.inputs.tensors(), use_cache=False).logits
    with open_golden(request) as golden:
        assert torch.equal(golden.forward(), expected)
        assert torch.equal(recorded_logits(golden, request), expected)
        assert torch.equal(golden.forward(), expected)
        modules = golden.model.named_modules()
        left = [name for name, one in modules if one._forward_hooks or one._forward_pre_hooks]
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
            graph=request.model.spec.graph,
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


def test_trace_of_the_golden_model_is_the_golden(
    ask: Any, golden: Path, command: Any, tmp_path: Path
) -> None:
    """A trace that transformers' own model debugger writes is read as a capture."""
    from transformers.model_debugging_utils import model_addition_debugger_context

    inputs = Capture.open(golden).read_inputs()
    with open_golden(ask()) as opened, torch.no_grad():
        with model_addition_debugger_context(
            opened.model, debug_path=str(tmp_path / "trace"), use_repr=False
        ):
            opened.model(**inputs.tensors())
    # The debugger leaves them changed.
    torch.set_printoptions(profile="default")
    result = command(mm2_compare, "--golden", golden, "--run", tmp_path / "trace", "--json", "--quiet")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["verdict"]) == (0, "pass")
    # Of modules with submodules it keeps no outputs, and rotated queries and keys are no module's.
    missing = {site["site"] for site in record["sites"] if site["status"] != "pass"}
    assert missing == {"q_rope", "k_rope", "moe_delta"}
    assert all(site["noise"]["whole"] <= 1.01 for site in record["sites"] if site.get("noise"))


# Natural tokens, too few for the 32 experts of a layer, and as many expert tokens as have places for all.
ROWS = [[5, 9, 2, 7], [8, 1, *[3] * 8]]


@pytest.fixture(scope="module")
def request_of_few(ask: Any) -> GoldenRequest:
    inputs = pad_rows(ROWS, padding_side="right", buckets=(), pad_token_id=0, source="a test")
    request: GoldenRequest = ask(noise_floor="stats")
    return replace(request, inputs=replace(inputs, expert_tokens=ExpertTokens(row=1, count=8)))


@pytest.fixture(scope="module")
def reached(request_of_few: GoldenRequest, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return capture(request_of_few, tmp_path_factory.mktemp("reached"))


def test_every_expert_of_every_layer_is_chosen(reached: Capture) -> None:
    left_by_others = [len(reached.natural().unreached_experts(layer) or ()) for layer in reached.layers]
    assert min(left_by_others) > 8
    assert [reached.unreached_experts(layer) for layer in reached.layers] == [()] * 4


def test_they_choose_clearly(reached: Capture) -> None:
    is_made = reached.read_inputs().is_expert_token
    for layer in reached.layers:
        margin = reached.read_floor(layer, ROUTER_MARGIN)
        assert margin is not None
        assert float(margin[is_made].min()) > 0.01


def test_natural_tokens_have_the_values_of_a_golden_without_them(
    reached: Capture, request_of_few: GoldenRequest, tmp_path: Path
) -> None:
    natural = replace(request_of_few, inputs=request_of_few.inputs.natural())
    plain, view = capture(natural, tmp_path), reached.natural()
    is_real = view.read_inputs().attention_mask.bool()
    assert torch.equal(is_real, plain.read_inputs().attention_mask.bool())
    for layer in reached.layers:
        found, expected = (one.read(layer, Site.OUTPUT)[is_real].float() for one in (view, plain))
        assert torch.allclose(found, expected, rtol=2e-2, atol=2e-2)
    assert view.description.expert_tokens is None
    assert plain.unreached_experts(0) == view.unreached_experts(0)


def test_layer_alone_has_the_states_that_it_has_in_the_whole(
    reached: Capture, request_of_few: GoldenRequest, tmp_path: Path
) -> None:
    alone = capture(replace(request_of_few, run=single_layer_run(2, sites_level="all")), tmp_path)
    for site in ModelGraph().sites:
        is_made = reached.read_inputs().is_expert_token
        if not site.has_heads_dim:
            assert torch.equal(alone.read(2, site)[is_made], reached.read(2, site)[is_made]), site

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.taps import verify_taps
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.reference.modules import LAYER_TAPS, read_config, recording_layer, require_golden_extra

WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
from gpu_reference.cli import main
main(sys.argv[1:])
"""

GRAPH = ModelGraph().layer(0)


@pytest.fixture(scope="module")
def layers(toy: Path) -> Any:
    """Two decoder layers of the toy's size, each with weights of its own."""
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2DecoderLayer

    config = read_config(toy, num_hidden_layers=2)
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    torch.manual_seed(0)
    built = [MiniMaxM2DecoderLayer(config, index).eval() for index in range(2)]
    for layer in built:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
    return built


def forward(layer: Any, states: torch.Tensor) -> torch.Tensor:
    length, rotary = states.shape[1], layer.self_attn.config.rotary_dim
    angles = torch.arange(length)[None, :, None] * torch.ones(rotary)
    with torch.no_grad():
        output: torch.Tensor = layer(
            states, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None
        )
    return output


def test_taps_name_submodules_that_transformers_has(layers: Any) -> None:
    taps = {site: tap for site, tap in LAYER_TAPS.items() if site in ModelGraph().sites}
    verify_taps(layers[0], taps)
    assert set(ModelGraph().sites) - set(LAYER_TAPS) == {Site.Q_ROPE, Site.K_ROPE}


def test_recording_shows_the_sites_asked_for_and_changes_no_bit(layers: Any) -> None:
    states = torch.randn(2, 5, 256)
    plain = forward(layers[0], states)
    for sites in (ModelGraph().sites, (Site.K_ROPE, Site.OUTPUT)):
        with recording_layer(layers[0], sites=sites, graph=GRAPH, attn_implementation="sdpa") as tensors:
            recorded = forward(layers[0], states)
        assert torch.equal(recorded, plain)
        assert set(tensors) == set(sites)
        assert torch.equal(tensors[Site.OUTPUT], plain)
        assert torch.equal(tensors.get(Site.INPUT, states), states)


def test_each_recording_sees_its_own_layer(layers: Any) -> None:
    states = torch.randn(1, 3, 256)
    with (
        recording_layer(layers[0], sites=(Site.Q_ROPE,), graph=GRAPH, attn_implementation="sdpa") as first,
        recording_layer(layers[1], sites=(Site.Q_ROPE,), graph=GRAPH, attn_implementation="sdpa") as second,
    ):
        forward(layers[0], states)
        assert (set(first), set(second)) == ({Site.Q_ROPE}, set())
        forward(layers[1], states)
    assert not torch.equal(first[Site.Q_ROPE], second[Site.Q_ROPE])


def test_attention_of_another_implementation_is_not_seen_and_a_misspelt_one_does_not_run(
    layers: Any,
) -> None:
    with recording_layer(
        layers[0], sites=(Site.Q_ROPE,), graph=GRAPH, attn_implementation="eager"
    ) as tensors:
        forward(layers[0], torch.randn(1, 3, 256))
    assert tensors == {}
    with (
        pytest.raises(KeyError, match="sdpaa"),
        recording_layer(layers[0], sites=(Site.Q_ROPE,), graph=GRAPH, attn_implementation="sdpaa"),
    ):
        pass


def test_config_is_cut_to_the_layers_asked_for(toy: Path) -> None:
    config = read_config(toy, num_hidden_layers=2)
    assert (config.num_hidden_layers, config.hidden_size, config.rotary_dim) == (2, 256, 32)


def test_goldens_do_not_start_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USE_TORCH_XLA", raising=False)
    require_golden_extra("a test")
    assert os.environ["USE_TORCH_XLA"] == "0"
    monkeypatch.setenv("USE_TORCH_XLA", "1")
    require_golden_extra("a test")
    assert os.environ["USE_TORCH_XLA"] == "1"


def test_host_without_transformers_is_told_what_to_install(toy: Path, forked_python: Any) -> None:
    arguments = ["single-layer", "--layer", "0", "--model", toy, "--no-save"]
    done = forked_python(WITHOUT_TRANSFORMERS, *arguments)
    assert done.returncode == 3
    assert "a golden capture needs the package 'transformers', which is not installed here" in done.stderr
    assert "Traceback" not in done.stderr

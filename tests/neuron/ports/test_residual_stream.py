from __future__ import annotations

import torch
from torch import nn

from neuron.ports.vllm_neuron_model import find_stream_sites, passes_summands, show_stream


class AddingNorm(nn.Module):
    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (states + residual).tanh(), states + residual


class Layer(nn.Module):
    """Called as vLLM calls its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Identity()
        self.post_attention_layernorm = AddingNorm()

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = torch.zeros_like(hidden_states)
        return self.post_attention_layernorm(self.self_attn(hidden_states), residual)


class WholeLayer(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def test_the_stream_is_shown_and_its_sum_stays() -> None:
    layer, hooked = Layer(), Layer()
    show_stream(hooked)
    given: list[torch.Tensor] = []
    hooked.register_forward_pre_hook(
        lambda _, args, kwargs: given.extend((*args, *kwargs.values())), with_kwargs=True
    )
    states, residual, positions = torch.randn(3, 4), torch.randn(3, 4), torch.arange(3)
    # With zeros beside it, the first norm sees the same sum.
    before = layer(positions, states, residual)[1]
    stream, zeros = hooked(positions, states, residual)
    assert torch.equal(given[0], states + residual)
    assert torch.equal(stream, before.tanh() + before)
    assert not zeros.any()


def test_the_first_layer_has_no_residual_yet() -> None:
    layer = Layer()
    show_stream(layer)
    stream, _ = layer(torch.arange(3), torch.ones(3, 4), None)
    assert torch.allclose(stream, torch.ones(3, 4).tanh() + 1)


def test_the_norm_behind_the_attention_shows_the_stream() -> None:
    sites = find_stream_sites(Layer())
    assert sites["attn_residual"] == "post_attention_layernorm:output[1]"
    assert sites["post_norm"] == "post_attention_layernorm:output[0]"
    assert "input" not in sites


def test_layers_are_told_apart_by_their_arguments() -> None:
    assert passes_summands(Layer())
    assert not passes_summands(WholeLayer())

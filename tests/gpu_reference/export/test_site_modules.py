"""Modules of sites, and the port's own names for them."""

from __future__ import annotations

import pytest

from gpu_reference.export.vllm_neuron import SiteModules
from minimax_tools.errors import UsageError
from minimax_tools.model.sites import ModelSite, Site


def test_default_names_are_those_of_transformers_own_model() -> None:
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    config = MiniMaxM2Config(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_local_experts=2,
        num_experts_per_tok=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    )  # fmt: skip
    modules = dict(MiniMaxM2ForCausalLM(config).named_modules())
    usual = SiteModules()
    assert {usual.find(site, 1) for site in usual.paths} <= modules.keys()


def test_port_may_name_a_module_otherwise() -> None:
    named = SiteModules.parse(["moe_delta=model.layers.{layer}.block_sparse_moe", "final_norm = model.final"])
    assert named.find(Site.MOE_DELTA, 7) == "model.layers.7.block_sparse_moe"
    assert named.find(ModelSite.FINAL_NORM, None) == "model.final"
    assert named.find(Site.Q_ROPE, 7) is None
    assert named.find(Site.POST_NORM, 7) == "model.layers.7.post_attention_layernorm"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q_rope=model.layers.{layer}.rope", "'q_rope' is not the first output of a module"),
        ("moe_delta", "names no module of moe_delta"),
        ("moe_delta=model.layers.3.mlp", "names no module of moe_delta"),
        ("logits=model.layers.{layer}.head", "names no module of logits"),
        ("moe_delta=../{layer}", "names no module of moe_delta"),
        ("moe_delta=a/{layer}", "names no module of moe_delta"),
        ("moe_delta=model.layers.{layer}", "gives moe_delta and output one module"),
    ],
)
def test_name_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SiteModules.parse([text])

"""The sites that a port shows: those it names, or those found by the usual names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from minimax_tools.errors import TargetError
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from neuron.ports.exposure import Exposure, find_exposure

# What the reference layer's submodules do not show by their names alone.
HIDDEN = {"q_rope", "k_rope", "router_experts", "router_weights"}

DECLARING = "class Port(ReferenceLayer):\n    sites = {sites}\n"


@pytest.fixture
def run_port(run: Any, write_port: Any, on_small: Any) -> Any:
    """Runs layer 1 of the small model on the golden's input through a port; the result and its JSON."""

    def run_source(source: str) -> tuple[Any, dict[str, Any]]:
        arguments = ("single-layer", "--layer", 1, *on_small, "--json")
        result = run(*arguments, "--target", write_port(source))
        return result, json.loads(result.stdout)

    return run_source


def stored(record: dict[str, Any]) -> set[str]:
    return set(load_file(Path(record["directory"]) / "layer_1.safetensors"))


def test_usual_names_are_found(run_port: Any) -> None:
    result, record = run_port(DECLARING.format(sites=None))
    assert result.exit_code == 0
    assert stored(record) == {str(site) for site in ModelGraph().sites} - HIDDEN
    assert set(record["layers"][0]["not_exposed"]) == HIDDEN
    assert (record["compared"], record["of"]) == (13, 17)


@pytest.mark.parametrize(
    ("renamed", "name"),
    [("block_sparse_moe", "mlp"), ("self_attn", "attention"), ("post_attention_layernorm", "ffn_norm")],
)
def test_other_usual_names_are_found_too(run_port: Any, renamed: str, name: str) -> None:
    source = f"""
class Port(ReferenceLayer):
    sites = None

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.{name} = self.{renamed}
        del self.{renamed}
        self.__dict__["{renamed}"] = self.{name}

    def convert_state_dict(self, tensors, config, layer_idx):
        return {{key.replace("{renamed}.", "{name}."): tensors[key] for key in tensors}}
"""
    result, record = run_port(source)
    assert result.exit_code == 0, result.stderr
    assert set(record["layers"][0]["not_exposed"]) == HIDDEN


NAMED = {
    "attn_residual": "post_attention_layernorm:input",
    "router_experts": "block_sparse_moe.router:output[0]",
    "router_weights": "block_sparse_moe.router:output[1]",
}


@pytest.mark.parametrize("sites", [{}, {"moe_delta": "block_sparse_moe"}, NAMED])
def test_declared_sites_are_the_only_ones_by_output_input_or_element(run_port: Any, sites: Any) -> None:
    result, record = run_port(DECLARING.format(sites=sites))
    assert result.exit_code == 0
    assert stored(record) == {"input", *sites, "output"}
    assert record["compared"] == 1 + len(sites)


def test_misleading_name_is_not_exposed_rather_than_wrong(run_port: Any) -> None:
    source = """
class Scaled(nn.Module):
    def forward(self, states):
        return states[..., :8]

class Port(ReferenceLayer):
    sites = None

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.input_norm_of_before = self.input_layernorm
        self.attn = Scaled()
        self.moe = Scaled()
        self.feed_forward = self.block_sparse_moe
        del self.block_sparse_moe

    def convert_state_dict(self, tensors, config, layer_idx):
        names = {key: key.replace("block_sparse_moe.", "feed_forward.") for key in tensors}
        state = {name: tensors[key] for key, name in names.items()}
        return {**state, "input_norm_of_before.weight": tensors["input_layernorm.weight"]}

    def forward(self, hidden_states, attention_mask, position_ids):
        normed = self.input_layernorm(hidden_states)
        residual = hidden_states + self.self_attn(normed, attention_mask, position_ids)
        self.moe(residual)
        return residual + self.feed_forward(self.post_attention_layernorm(residual))
"""
    result, record = run_port(source)
    assert result.exit_code == 0, result.stderr
    assert "moe_delta" in record["layers"][0]["not_exposed"]
    assert "attn_delta" in stored(record)


def test_declared_site_of_another_shape_fails(run_port: Any) -> None:
    result, record = run_port(DECLARING.format(sites={"moe_delta": "self_attn.k_proj"}))
    failed = {site["site"]: site["reason"] for site in record["sites"] if site["status"] == "fail"}
    assert result.exit_code == 1
    assert failed == {"moe_delta": "shape: expected (2, 24, 64), found (2, 24, 128)"}


def test_flat_tokens_are_the_batch_laid_end_to_end(run_port: Any) -> None:
    source = """
class Port(ReferenceLayer):
    sites = {"moe_delta": "block_sparse_moe", "router_logits": "block_sparse_moe.gate"}

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.block_sparse_moe.register_forward_hook(lambda module, args, output: output.flatten(0, 1))

    def forward(self, hidden_states, attention_mask, position_ids):
        normed = self.input_layernorm(hidden_states)
        residual = hidden_states + self.self_attn(normed, attention_mask, position_ids)
        return residual + self.block_sparse_moe(self.post_attention_layernorm(residual)).view(residual.shape)
"""
    result, record = run_port(source)
    shapes = {site["site"]: site["shape"] for site in record["layers"][0]["sites"]}
    assert result.exit_code == 0
    assert (shapes["moe_delta"], shapes["router_logits"]) == ([2, 24, 64], [2, 24, 8])


@pytest.mark.parametrize(
    ("sites", "texts"),
    [
        ("{'moe_output': 'block_sparse_moe'}", ("'moe_output' is no site of a decoder layer", "moe_delta")),
        ("{'moe_delta': 'block_sparse_moe:weights'}", ("sites['moe_delta']", "'block_sparse_moe:weights'")),
        (
            "{'moe_delta': 'experts'}",
            ("sites name submodules that Port does not have", "moe_delta: 'experts'"),
        ),
        ("{'moe_delta': 3}", ("sites is no mapping of names", "{'moe_delta': 3}")),
        ("['moe_delta']", ("sites is no mapping of names",)),
    ],
)
def test_sites_that_mean_nothing_are_an_error(run_port: Any, sites: str, texts: tuple[str, ...]) -> None:
    result, _ = run_port(DECLARING.format(sites=sites))
    assert result.exit_code == 3
    assert [text for text in texts if text not in result.stderr] == []
    assert "Traceback" not in result.stderr


def test_site_found_by_name_that_is_nan_on_all_ranks_is_shown() -> None:
    exposure = Exposure(taps={}, declared=frozenset())
    tensor = torch.ones(1, 2, 4)
    tensor[0, 1] = float("nan")
    assembled = exposure.assemble(Site.MOE_DELTA, [tensor, tensor.clone()], (1, 2), head_dim=4, what="a port")
    assert assembled is not None
    assert assembled.isnan().equal(tensor.isnan())
    unlike = exposure.assemble(Site.MOE_DELTA, [tensor, 2 * tensor], (1, 2), head_dim=4, what="a port")
    assert unlike is None


def test_output_is_whole_on_every_rank() -> None:
    module = nn.Linear(2, 2)
    module.sites = {"output": "@partial"}  # type: ignore[assignment]  # as a port may write it
    with pytest.raises(
        TargetError, match=r"sites\['output'\] is @partial: expected the whole of it on every rank"
    ):
        find_exposure(module, what="port port.py:Port, layer 0")


FUSED = """
class Attention(ReferenceAttention):
    def __init__(self, config):
        super().__init__(config)
        widths = [self.q_proj.out_features, self.k_proj.out_features, self.v_proj.out_features]
        self.qkv = nn.Linear(config.hidden_size, sum(widths), bias=False)
        for name in ("q_proj", "k_proj", "v_proj"):
            delattr(self, name)
        self.widths = widths
        self.fused = None
        self.q_proj, self.k_proj, self.v_proj = (Part(self, number) for number in range(3))


class Part:
    def __init__(self, attention, number):
        self.attention, self.number = attention, number

    def __call__(self, hidden_states):
        if self.number == 0:
            self.attention.fused = self.attention.qkv(hidden_states).split(self.attention.widths, dim=-1)
        return self.attention.fused[self.number]


class Port(ReferenceLayer):
    sites = SITES

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = Attention(config)

    def convert_state_dict(self, tensors, config, layer_idx):
        names = ["self_attn.%s_proj.weight" % name for name in "ORDER"]
        fused = torch.cat([tensors[name] for name in names])
        rest = {name: tensors[name] for name in tensors if name not in names}
        return {**rest, "self_attn.qkv.weight": fused}
"""


def fused_port(stop: int = 768, *, order: str = "qkv") -> str:
    """A port whose q, k and v come from one projection of the small model, shown by cuts."""
    cuts = {"q_proj": (0, 512), "k_proj": (512, 640), "v_proj": (640, stop)}
    sites = {site: f"self_attn.qkv:output[0][{start}:{end}]" for site, (start, end) in cuts.items()}
    return FUSED.replace("SITES", repr(sites)).replace("ORDER", order)


def test_parts_of_a_fused_projection_are_shown(run_port: Any) -> None:
    result, record = run_port(fused_port())
    assert result.exit_code == 0, result.stderr
    assert {"q_proj", "k_proj", "v_proj"} <= stored(record)
    judged = {site["site"]: site["status"] for site in record["sites"]}
    assert [judged[site] for site in ("q_proj", "k_proj", "v_proj")] == ["pass"] * 3


def test_wrong_part_of_a_fused_projection_is_blamed(run_port: Any) -> None:
    _, record = run_port(fused_port(order="qvk"))
    assert record["verdict"] == "fail"
    blamed = {site for blame in record["blame"] for site in blame["sites"]}
    assert {"k_proj", "v_proj"} <= blamed
    assert "q_proj" not in blamed


def test_cut_beyond_the_projection_is_refused(run_port: Any) -> None:
    result, record = run_port(fused_port(stop=900))
    assert result.exit_code == 3
    assert "self_attn.qkv:output[0][640:900] cannot be cut" in record["error"]
    assert "[2, 24, 768]" in record["error"]

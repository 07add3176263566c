"""`--target nxdi:…`: how a layer on neuronx-distributed-inference is built, called and judged.

What needs the package is skipped where it cannot be imported; the layout it loads has tests of its own.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from minimax_tools.errors import TargetError
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.ports.nxdi import NxdiLayer, convert_by_table
from neuron.ports.nxdi_layout import NxdiLayout

PORTS = Path(__file__).parents[2] / "ports"


class Layer(nn.Module):
    """Called as NxDI calls its layers; it returns what it was given, to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.Identity(), nn.Identity()
        self.self_attn = nn.ModuleDict(
            {"qkv_proj": nn.ModuleDict({"q_proj": nn.Identity()}), "o_proj": nn.Identity()}
        )
        self.mlp = nn.ModuleDict({"router": nn.Identity()})
        self.given: dict[str, Any] = {}

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
        self.given = given
        return hidden_states, hidden_states


def wrapped(layer: nn.Module, *, is_cpu_mode: bool = True) -> NxdiLayer:
    layout = NxdiLayout(spec=SyntheticModel().spec(), tp_degree=1, rank=0)
    return NxdiLayer(
        layer,
        conversion=convert_by_table(layer, layout),
        layout=layout,
        neuron_config=SimpleNamespace(),
        is_cpu_mode=is_cpu_mode,
    )


@pytest.fixture
def layer() -> NxdiLayer:
    return wrapped(Layer())


def given(layer: NxdiLayer) -> dict[str, Any]:
    module = layer.layer
    assert isinstance(module, Layer)
    return module.given


def test_prefill_gets_a_boolean_mask_that_is_causal_and_hides_padding(layer: NxdiLayer) -> None:
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    layer(torch.zeros(2, 3, 4), mask, torch.arange(3).expand(2, 3))
    found = given(layer)
    assert set(found) == {"attention_mask", "position_ids"}
    assert found["attention_mask"].dtype is torch.bool
    assert found["attention_mask"].int().tolist() == [
        [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]],
        [[[0, 0, 0], [0, 1, 0], [0, 1, 1]]],
    ]
    assert layer._neuron_config.is_prefill_stage is True


def test_decoding_tells_apart_what_is_seen_of_the_past_and_of_its_own_rows(layer: NxdiLayer) -> None:
    past = (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    mask = torch.tensor([[1, 0, 1, 1, 1]])
    layer(torch.zeros(1, 2, 8), mask, torch.tensor([[2, 3]]), past_key_value=past)
    found = given(layer)
    assert found["attention_mask"].int().tolist() == [[[[1, 0, 1], [1, 0, 1]]]]
    assert found["active_mask"].int().tolist() == [[[[1, 0], [1, 1]]]]
    assert found["past_key_value"] is past
    assert layer._neuron_config.is_prefill_stage is False


def test_sites_are_found_where_layers_on_nxdi_show_them(layer: NxdiLayer) -> None:
    assert layer.sites == {
        "input_norm": "layer.input_layernorm",
        "q_proj": "layer.self_attn.qkv_proj.q_proj@shard(-1; 0,1,2,3,4,5,6,7)",
        "attn_context": "layer.self_attn.o_proj:input@shard(-1; 0,1,2,3,4,5,6,7)",
        "attn_delta": "layer.self_attn.o_proj",
        "attn_residual": "layer.post_attention_layernorm:input",
        "post_norm": "layer.post_attention_layernorm",
        "router_logits": "layer.mlp.router:output[0]",
        "router_experts": "layer.mlp.router:output[2]",
        "moe_delta": "layer.mlp",
    }


def test_sites_of_the_class_come_first() -> None:
    class Declaring(Layer):
        sites = {"moe_delta": "mlp:output[1]"}  # noqa: RUF012 - what a porter writes

    assert wrapped(Declaring()).sites == {"moe_delta": "layer.mlp:output[1]"}


def test_cpu_that_nxd_was_not_told_of_is_refused() -> None:
    layer = wrapped(Layer(), is_cpu_mode=False)
    with pytest.raises(TargetError, match="expected NXD_CPU_MODE=1, found NXD_CPU_MODE=0"):
        layer(torch.zeros(1, 2, 4), torch.ones(1, 2), torch.arange(2)[None])


def test_without_the_package_it_says_what_to_install(run_layer: Any, run_python: Any) -> None:
    done: subprocess.CompletedProcess[str] = run_python("import neuronx_distributed_inference.models.config")
    if done.returncode == 0:
        pytest.skip("neuronx_distributed_inference is installed")
    result = run_layer("nxdi:some.module:Layer")
    assert result.exit_code == 3
    assert "needs the package neuronx_distributed_inference" in result.stderr
    assert "pip.repos.neuron.amazonaws.com" in result.stderr


@pytest.fixture
def sweep(needs_nxdi: None, process: Any, toy: Path, golden: Path) -> Any:
    """Runs two layers of a port on the CPU, on NxDI itself: the process, and its JSON."""

    def run(target: str, *options: object) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        given = ("sweep", "--layers", "0:2", "--model", toy, "--golden", golden, "--backend", "cpu", "--json")
        done = process(*given, "--target", f"nxdi:{PORTS}/{target}", *options, NXD_CPU_MODE="1")
        assert done.stdout, done.stderr
        return done, json.loads(done.stdout)

    return run


@pytest.mark.parametrize(
    ("target", "options", "counts"),
    [
        ("nxdi_port.py:DecoderLayer", (), (30, 34)),
        ("nxdi_port.py:DecoderLayer", ("--decode", 3), None),
        # The class chooses its config; of the fused projection its three parts do not show.
        ("nxdi_port.py:FusedProjection", (), (24, 34)),
        # The application's conversion and NxDI's cast are run.
        ("causal_port.py:AsDeclared", (), (30, 34)),
    ],
)
def test_right_port_passes(
    sweep: Any, target: str, options: tuple[object, ...], counts: tuple[int, int] | None
) -> None:
    done, record = sweep(target, *options)
    assert (done.returncode, record["verdict"]) == (0, "pass"), done.stderr
    assert counts in (None, (record["compared"], record["of"]))


def test_port_without_a_place_for_the_bias_is_told_and_blamed(sweep: Any) -> None:
    done, record = sweep("nxdi_port.py:WithoutBias")
    assert done.returncode == 1
    assert "no place for block_sparse_moe.e_score_correction_bias" in done.stderr
    assert {site for blame in record["blame"] for site in blame["sites"]} == {"router_experts"}


def test_router_is_cast_unless_declared(sweep: Any) -> None:
    done, record = sweep("causal_port.py:DecoderLayer")
    assert done.returncode == 1
    assert record["observed_dtypes"] == {"correction_bias": "bfloat16", "router_gate": "bfloat16"}

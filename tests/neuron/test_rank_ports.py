"""Ports on several ranks: one that says how its sites are divided, mistakes that only ranks make, and memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.synthetic.toy_model import SyntheticModel

Judged = Callable[..., dict[str, Any]]

# Heads and the norms' widths divided, the experts whole on every rank; the sum over the ranks is left to `sites`.
OWN_PORT = """
import copy
import torch.distributed as dist

class WideNorm(nn.Module):
    def __init__(self, width, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width // dist.get_world_size()))
        self.width, self.eps = width, config.rms_norm_eps

    def forward(self, states):
        square = states.float().pow(2).sum(-1, keepdim=True)
        dist.all_reduce(square)
        return self.weight * (states.float() * torch.rsqrt(square / self.width + self.eps)).to(states.dtype)

class Attention(ReferenceAttention):
    def __init__(self, config):
        local = copy.copy(config)
        local.num_attention_heads //= dist.get_world_size()
        local.num_key_value_heads //= dist.get_world_size()
        super().__init__(local)
        self.q_norm = WideNorm(config.num_attention_heads * config.head_dim, config)
        self.k_norm = WideNorm(config.num_key_value_heads * config.head_dim, config)

    def forward(self, states, mask, positions):
        delta = super().forward(states, mask, positions)
        dist.all_reduce(delta)
        return delta

class Port(ReferenceLayer):
    sites = {
        **{name: f"self_attn.{name}@shard(-1)" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")},
        **{name: f"self_attn.{name}@shard(1)" for name in ("q_rope", "k_rope")},
        "attn_context": "self_attn.o_proj:input@shard(2)",
        "attn_delta": "self_attn.o_proj@partial",
        "attn_residual": "post_attention_layernorm:input@replicate",
        "post_norm": "post_attention_layernorm",
        "router_logits": "block_sparse_moe.gate",
        "moe_delta": "block_sparse_moe",
    }

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = Attention(config)
        self.lead_alone = nn.Identity()

    def forward(self, states, mask, positions):
        if dist.get_rank() == 0:
            self.lead_alone(states)
        return super().forward(states, mask, positions)

    @staticmethod
    def convert_state_dict(tensors, config, layer_idx):
        def own(name, tensor):
            dim = 1 if "o_proj" in name else 0
            divides = name.startswith("self_attn.")
            return tensor.chunk(config.ranks.degree, dim=dim)[config.ranks.rank] if divides else tensor
        return {name: own(name, tensors[name]) for name in tensors}
"""
PER_RANK_NORM = """
from neuron.builtin.layer import DeviceAttention, DeviceLayer

class PerRankNorm(DeviceAttention):
    def _mean_squares(self, queries, keys):
        return None, None

class Port(DeviceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn.__class__ = PerRankNorm
"""


@pytest.fixture
def judge(forked_ranks: Any, on_small: tuple[object, ...], tmp_path: Path) -> Judged:
    """Runs layer 1 of the small model on two ranks; the verdict, and `exit_code` and `stderr` beside it."""

    def run_on_two(target: str, *arguments: object) -> dict[str, Any]:
        run = ("single-layer", "--layer", 1, *on_small, "--backend", "cpu")
        place = ("--output-dir", tmp_path / "capture", "--target", target, "--json")
        done = forked_ranks(*run, *place, *arguments)
        return {**json.loads(done.stdout), "exit_code": done.returncode, "stderr": done.stderr}

    return run_on_two


def test_a_port_of_ones_own_passes(judge: Judged, write_port: Any, tmp_path: Path) -> None:
    found = judge(write_port(OWN_PORT), "--also", "lead=lead_alone")
    assert (found["exit_code"], found["verdict"]) == (0, "pass"), found["stderr"]
    compared = {site["site"] for layer in found["layers"] for site in layer["sites"]}
    assert {"q_proj", "k_rope", "attn_context", "attn_delta"} <= compared
    assert Capture.open(tmp_path / "capture").further(1) == ("lead.rank0",)


# The same mistake in a port of one process is named and proved by fast tests: NormPerRank of ports/planted.py.
@pytest.mark.slow
def test_a_norm_over_a_ranks_own_heads_is_to_blame(judge: Judged, write_port: Any) -> None:
    found = judge(write_port(PER_RANK_NORM))
    assert (found["exit_code"], found["verdict"]) == (1, "fail")
    assert found["blame"][0]["layer"] == 1
    assert {"q_norm", "k_norm"} & set(found["blame"][0]["sites"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("declared", "wrong", "errors"),
    [
        ('self_attn.o_proj@partial"', 'self_attn.o_proj"', ("attn_delta is not the same on all ranks",)),
        ("@shard(-1)", "", ("q_proj is not the same on all ranks",)),
        (
            "o_proj:input@shard(2)",
            "o_proj:input@shard(4)",
            ("attn_context is @shard(4), and has no such dim",),
        ),
        ("@shard(2)", "@shards(2)", ("the layout '@shards(2)' cannot be read",)),
        # A sum that is not made.
        (
            "dist.all_reduce(delta)",
            "pass",
            ("attn_residual is not the same on all ranks", "a reduction is missing"),
        ),
    ],
)
def test_a_wrong_layout_is_named(
    judge: Judged, write_port: Any, declared: str, wrong: str, errors: tuple[str, ...]
) -> None:
    assert declared in OWN_PORT
    found = judge(write_port(OWN_PORT.replace(declared, wrong)))
    assert (found["exit_code"], found["verdict"]) == (3, "incomparable")
    assert [error for error in errors if error not in found["error"]] == []


@pytest.mark.slow
def test_a_dim_that_is_another_fails_by_its_shape(judge: Judged, write_port: Any) -> None:
    found = judge(write_port(OWN_PORT.replace("o_proj:input@shard(2)", "o_proj:input@shard(1)")))
    assert (found["exit_code"], found["verdict"]) == (1, "fail")
    assert found["blame"][0]["sites"] == ["attn_context"]


@pytest.mark.slow
def test_of_sites_that_are_found_by_name_those_count_that_are_whole(judge: Judged, write_port: Any) -> None:
    """Assert that mm2 does not guess which part of a site a rank holds: a right port in another order would fail."""
    found = judge(write_port(re.sub(r"sites = \{.*?\n    \}\n", "sites = None\n", OWN_PORT, flags=re.DOTALL)))
    assert found["verdict"] == "pass", found["stderr"]
    compared = {site["site"] for layer in found["layers"] for site in layer["sites"]}
    not_exposed = {site for layer in found["layers"] for site in layer["not_exposed"]}
    assert {"attn_delta", "post_norm", "output"} <= compared
    assert {"q_proj", "k_proj", "q_norm", "attn_context"} <= not_exposed


@pytest.mark.slow
def test_rows_are_decoded(judge: Judged) -> None:
    found = judge("builtin", "--decode", 3)
    assert (found["exit_code"], found["verdict"]) == (0, "pass"), found["stderr"]


@pytest.mark.slow
@pytest.mark.parametrize("component", ["attention", "experts"])
def test_a_component_is_fed_on_every_rank(
    forked_ranks: Any, on_small: tuple[object, ...], tmp_path: Path, component: str
) -> None:
    run = ("component", "--layer", 2, "--component", component, *on_small, "--backend", "cpu")
    done = forked_ranks(*run, "--output-dir", tmp_path / "capture")
    assert done.returncode == 0, done.stderr


# Loads layer 0 as one rank of several, and tells the bytes of its weights and the growth of its memory at the peak.
LOAD = """
import json, re
from pathlib import Path
import torch
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.model.spec import ModelSpec
from neuron.devices.ranks import Ranks
from neuron.devices.weights import WeightLoader
from neuron.ports.targets import find_target

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

folder, ranks = Path({folder!r}), Ranks(rank=1, degree={degree}, expert_degree={expert_degree})
spec, target = ModelSpec.from_folder(folder), find_target("builtin")

def load():
    with CheckpointReader(folder) as reader, ReadingPool(2) as pool:
        tensors = LayerTensors.open(reader, spec, 0, torch.bfloat16)
        loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=pool)
        module = target.build(spec, 0, dtype=torch.bfloat16, ranks=ranks)
        target.load(module, tensors, spec, loader=loader, ranks=ranks)
        return sum(tensor.nbytes for tensor in module.state_dict().values()), reader.num_bytes_read

# Code that is loaded with the first use of it counts as memory too.
load()
Path("/proc/self/clear_refs").write_text("5")
before = peak()
weights, num_bytes_read = load()
print(json.dumps([weights, peak() - before, num_bytes_read]))
"""


@pytest.fixture(scope="module")
def large(make_model: Any) -> tuple[Path, int]:
    """A model of 100 MB a layer, nearly all of them experts of a square matrix of half a megabyte."""
    model = SyntheticModel(num_hidden_layers=1, hidden_size=512, intermediate_size=512, num_local_experts=64)
    return make_model(model, torch.bfloat16), 64 * 3 * 512 * 512 * 2


@pytest.mark.parametrize(
    ("degree", "expert_degree"),
    [(4, 2), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(8, 8, marks=pytest.mark.slow)],
)
def test_a_rank_holds_its_part_of_a_layer_and_never_more(
    forked_python: Any, large: tuple[Path, int], degree: int, expert_degree: int
) -> None:
    folder, experts_bytes = large
    code = LOAD.format(folder=str(folder), degree=degree, expert_degree=expert_degree)
    done = forked_python(code)
    assert done.returncode == 0, done.stderr
    weights, growth, num_bytes_read = json.loads(done.stdout)
    assert experts_bytes / degree < weights < 1.1 * experts_bytes / degree
    # Beside them bands of rows, and what threads take.
    assert growth < weights + 16e6 < experts_bytes / 2
    if expert_degree == degree:
        # Of other experts nothing is read.
        assert num_bytes_read < 1.2 * experts_bytes / degree

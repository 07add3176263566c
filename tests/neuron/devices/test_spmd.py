"""Devices of one XLA process that share a layer, and processes of XLA on the CPU, which must not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.errors import TargetError
from neuron.devices.ranks import Ranks
from neuron.devices.spmd import TENSOR_AXIS, Spmd

REPOSITORY = Path(__file__).parents[3]
LIMIT = 1e-5
LAYER_0 = ("single-layer", "--layer", 0, "--seq-len", "12,7", "--dtype", "float32", "--json")

# Which part of its weights each of four devices holds, two groups of experts.
SHARDS = """
import json, sys
from pathlib import Path
import torch
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.model.spec import ModelSpec
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import open_runtime
from neuron.devices.weights import WeightLoader
from neuron.ports.targets import find_target

folder = Path({folder!r})
spec, target = ModelSpec.from_folder(folder), find_target("builtin")
with open_runtime("xla-cpu", ranks=Ranks(degree=4, expert_degree=2)) as runtime, ReadingPool(1) as pool:
    from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor

    module = target.build(spec, 0, dtype=torch.float32)
    loader = WeightLoader(runtime.device, wait=runtime.synchronise, pool=pool)
    with CheckpointReader(folder) as reader:
        target.load(module, LayerTensors.open(reader, spec, 0, torch.float32), spec, loader=loader)
    runtime.spmd.mark_division(module, what="port builtin")
    weights = {{name: module.state_dict()[name] for name in module.shardings}}
    shards = {{name: XLAShardedTensor(weight).local_shards for name, weight in weights.items()}}
    print(json.dumps({{name: [[*part.data.shape] for part in parts] for name, parts in shards.items()}}))
"""

# An all_reduce between two processes, and what the probe says of it.
SUM = """
import torch, torch.distributed as dist, torch_xla, torch_xla.distributed.xla_backend
from minimax_tools.errors import BackendError
from neuron.devices.distributed import probe_group

dist.init_process_group("xla", init_method="env://")
value = torch.ones(1, device=torch_xla.device())
dist.all_reduce(value)
try:
    probe_group(torch_xla.device())
except BackendError as error:
    print(f"world {dist.get_world_size()}, sum {value.item():.0f}: {error}\\n", end="")
"""


@pytest.fixture
def errors(needs_xla: None, run: Any, forked: Any, small: Path, tmp_path: Path) -> Any:
    """Relative L2 distances of layer 0's sites on so many devices from those of the CPU."""

    def compare(*arguments: object) -> dict[str, float]:
        alone = run(*LAYER_0, "--model", small, "--backend", "cpu", "--output-dir", tmp_path / "one")
        assert alone.exit_code == 0, alone.stderr
        place = ("--backend", "xla-cpu", "--output-dir", tmp_path / "shared")
        done = forked(*LAYER_0, "--model", small, *place, *arguments)
        assert done.returncode == 0, done.stderr
        graphs = json.loads(done.stdout)["graphs"]
        assert (graphs["first_layer"], graphs["later_layers"], graphs["fallbacks"]) == (3, 0, [])
        one, shared = (load_file(tmp_path / name / "layer_0.safetensors") for name in ("one", "shared"))
        return {site: _distance(shared[site], one[site]) for site in one}

    return compare


def test_two_devices_compute_what_one_does(errors: Any) -> None:
    found = errors("--tp-degree", 2)
    assert len(found) == 18
    assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
@pytest.mark.parametrize("ep_degree", [1, 2])
def test_four_devices_compute_what_one_does(errors: Any, ep_degree: int) -> None:
    found = errors("--tp-degree", 4, "--ep-degree", ep_degree)
    assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
def test_each_device_holds_its_part(needs_xla: None, run_python: Any, small: Path) -> None:
    done = run_python(SHARDS.format(folder=str(small)))
    assert done.returncode == 0, done.stderr
    shards = json.loads(done.stdout)
    # 8 heads of 64, hidden 64, 8 experts of width 64.
    assert shards["self_attn.q_proj.weight"] == [[128, 64]] * 4
    assert shards["self_attn.o_proj.weight"] == [[64, 128]] * 4
    assert shards["block_sparse_moe.experts.0.gate_up_proj"] == [[4, 64, 64]] * 4
    assert shards["block_sparse_moe.experts.0.down_proj"] == [[4, 64, 32]] * 4


@pytest.mark.slow
def test_a_port_that_is_not_sharded_is_told_of(needs_xla: None, process: Any, small: Path) -> None:
    run = (*LAYER_0, "--model", small, "--target", "reference", "--quiet")
    done = process(*run, "--backend", "xla-cpu", "--tp-degree", 2)
    assert done.returncode == 0, done.stderr
    assert "port reference has no `shardings`: each of 2 devices computes all of it" in done.stderr


def test_a_sharding_of_a_weight_that_the_port_lacks_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    module.shardings = {"weight": (TENSOR_AXIS, None), "proj.weight": (None, TENSOR_AXIS)}  # type: ignore[assignment]
    with pytest.raises(TargetError) as caught:
        Spmd(sharing=Ranks(degree=2)).mark_division(module, what="port port.py:Layer")
    error = caught.value
    assert error.what == "port port.py:Layer: `shardings` names weights that the module does not have"
    assert (error.expected, error.found) == ("names of its state_dict()", "proj.weight")
    assert error.next_step == "Correct the port's `shardings`."


@pytest.mark.slow
def test_another_reduce_dtype_is_refused(needs_xla: None, process: Any, small: Path) -> None:
    ranks = ("--tp-degree", 2, "--reduce-dtype", "bfloat16")
    done = process(*LAYER_0, "--model", small, "--backend", "xla-cpu", *ranks)
    assert done.returncode == 2
    assert "--reduce-dtype has no effect on xla-cpu" in done.stderr


@pytest.mark.slow
def test_collectives_between_processes_are_wrong_without_a_word_and_the_probe_tells(
    needs_xla: None, tmp_path: Path
) -> None:
    (tmp_path / "sum.py").write_text(SUM)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "sum.py"))
    done = subprocess.run(
        [sys.executable, *torchrun],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Two ranks, each with a one: nothing was added.
    assert done.stdout.count("world 2, sum 1: the process group adds up wrongly: expected 3.0") == 2


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())

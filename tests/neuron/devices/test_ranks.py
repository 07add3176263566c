"""Layers shared by several ranks, or by devices of one XLA process: each site as on one, each a part, failures told."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.errors import TargetError
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.devices.ranks import Ranks
from neuron.devices.spmd import TENSOR_AXIS, Spmd

Tensors = dict[str, torch.Tensor]

LIMIT = 1e-5
LAYER_0 = ("single-layer", "--layer", 0, "--seq-len", "12,7", "--dtype", "float32", "--json")

# The device layer, whose layer 1 fails until it is told to run.
FAILS_ONCE = """
from neuron.builtin.layer import DeviceLayer

class Port(DeviceLayer):
    reuse = False

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if layer_idx == 1 and os.environ.get("LAYER_1") != "runs":
            raise ValueError("not yet")
"""


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


@pytest.fixture(scope="module")
def model_of(make_model: Any) -> Callable[..., Path]:
    """A float32 model of so many heads and kv heads; 8 experts of width 24, which 5 ranks do not divide."""

    @functools.cache
    def make(num_heads: int, num_kv_heads: int) -> Path:
        model = SyntheticModel(
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=16,
            rotary_dim=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            intermediate_size=24,
        )
        made: Path = make_model(model, torch.float32)
        return made

    return make


def errors_of(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Relative L2 distances of all sites."""
    assert found.keys() == expected.keys()
    assert all(found[site].shape == expected[site].shape for site in expected)
    return {
        site: float((found[site].double() - expected[site].double()).norm() / expected[site].double().norm())
        for site in expected
    }


@pytest.mark.parametrize(
    ("heads", "num_ranks", "ep_degree"),
    [
        # Heads are padded, the kv head is on both ranks, each has other experts.
        ((3, 1), 2, 2),
        *(
            pytest.param(*division, marks=pytest.mark.slow)
            for division in (
                ((3, 1), 2, 1),
                ((6, 2), 4, 2),
                ((6, 2), 2, 1),
                ((6, 1), 4, 1),
                ((6, 3), 4, 4),
                ((6, 6), 4, 1),
                ((8, 2), 8, 2),
                ((6, 2), 8, 1),
                ((10, 5), 5, 1),
                ((10, 5), 4, 1),
            )
        ),
    ],
)
def test_every_site_is_that_of_one_rank(
    model_of: Any,
    run: Any,
    forked_ranks: Any,
    tmp_path: Path,
    heads: tuple[int, int],
    num_ranks: int,
    ep_degree: int,
) -> None:
    layer = (*LAYER_0, "--model", model_of(*heads), "--backend", "cpu", "--output-dir")
    alone = run(*layer, tmp_path / "one")
    assert alone.exit_code == 0, alone.stderr
    done = forked_ranks(*layer, tmp_path / "ranks", "--ep-degree", ep_degree, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    shared, one = (load_file(tmp_path / name / "layer_0.safetensors") for name in ("ranks", "one"))
    errors = errors_of(shared, one)
    assert len(errors) == 18
    assert max(errors.values()) <= LIMIT, errors


@pytest.mark.parametrize(
    ("num_devices", "ep_degree"),
    [(2, 1), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_several_devices_compute_what_one_does(
    needs_xla: None, run: Any, forked: Any, small: Path, tmp_path: Path, num_devices: int, ep_degree: int
) -> None:
    layer = (*LAYER_0, "--model", small, "--output-dir")
    alone = run(*layer, tmp_path / "one", "--backend", "cpu")
    assert alone.exit_code == 0, alone.stderr
    devices = ("--backend", "xla-cpu", "--tp-degree", num_devices, "--ep-degree", ep_degree)
    # Nothing is timed: the compiler need not try.
    flags = "--xla_backend_optimization_level=0"
    done = forked(*layer, tmp_path / "shared", *devices, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    graphs = json.loads(done.stdout)["graphs"]
    assert (graphs["first_layer"], graphs["later_layers"], graphs["fallbacks"]) == (3, 0, [])
    one, shared = (load_file(tmp_path / name / "layer_0.safetensors") for name in ("one", "shared"))
    errors = errors_of(shared, one)
    assert len(errors) == 18
    assert max(errors.values()) <= LIMIT, errors


@pytest.mark.slow
def test_a_capture_tells_its_ranks_and_resumes_with_the_same_alone(
    model_of: Any, process: Any, write_port: Any, tmp_path: Path
) -> None:
    port = write_port(FAILS_ONCE)
    run = ("multi-layer", "--layers", "0:2", "--model", model_of(6, 2), "--seq-len", "12,7", "--target", port)
    place = ("--backend", "cpu", "--output-dir", tmp_path / "capture")
    assert process(*run, *place, "--tp-degree", 2).returncode == 3
    other = process(*run, *place, "--tp-degree", 2, "--reduce-dtype", "bfloat16", LAYER_1="fails")
    assert "Starting anew" in other.stderr
    assert "options.reduce_dtype" in other.stderr
    resumed = process(*run, *place, "--tp-degree", 2, "--reduce-dtype", "bfloat16", LAYER_1="runs")
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming" in resumed.stderr
    assert "after layer 0" in resumed.stderr
    assert "divided among 2, summed in bfloat16" in resumed.stdout
    other = process(*run, *place, LAYER_1="runs")
    assert (other.returncode, "options.tp_degree" in other.stderr) == (3, True)
    anew = process(*run, *place, "--overwrite", LAYER_1="runs")
    assert anew.returncode == 0, anew.stderr


def test_one_rank_is_what_no_option_says(run: Any, model_of: Any, tmp_path: Path) -> None:
    for name, arguments in (("without", ()), ("with", ("--tp-degree", 1))):
        place = ("--backend", "cpu", "--output-dir", tmp_path / name)
        result = run(*LAYER_0, "--model", model_of(6, 2), *place, *arguments)
        assert result.exit_code == 0, result.stderr
    files = sorted(path.name for path in (tmp_path / "with").iterdir())
    assert "manifest.json" in files
    for name in files:
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()


@pytest.mark.slow
def test_the_whole_model_goes_on_with_the_same_tokens(
    model_of: Any, run: Any, process: Any, tmp_path: Path
) -> None:
    model = model_of(6, 2)
    whole = ("full", "--model", model, "--seq-len", "12,7", "--dtype", "float32", "--max-new-tokens", 4)
    place = ("--backend", "cpu", "--json", "--output-dir")
    alone = run(*whole, *place, tmp_path / "one")
    shared = process(*whole, *place, tmp_path / "ranks", "--tp-degree", 4)
    assert (alone.exit_code, shared.returncode) == (0, 0), shared.stderr
    assert json.loads(shared.stdout)["generation"] == json.loads(alone.stdout)["generation"]
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("ranks", "one"))
    assert max(errors_of(found, expected).values()) <= LIMIT


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
@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (
            ("--target", "reference", "--quiet"),
            0,
            "port reference has no `shardings`: each of 2 devices computes all of it",
        ),
        (("--reduce-dtype", "bfloat16"), 2, "--reduce-dtype has no effect on xla-cpu"),
    ],
)
def test_what_is_not_divided_or_has_no_effect_is_told(
    needs_xla: None, process: Any, small: Path, options: Any, exit_code: int, message: str
) -> None:
    done = process(*LAYER_0, "--model", small, "--backend", "xla-cpu", "--tp-degree", 2, *options)
    assert done.returncode == exit_code, done.stderr
    assert message in done.stderr


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
def test_collectives_between_processes_are_wrong_without_a_word_and_the_probe_tells(
    needs_xla: None, torchrun: Any, tmp_path: Path
) -> None:
    (tmp_path / "sum.py").write_text(SUM)
    done = torchrun(tmp_path / "sum.py", PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stderr
    # Two ranks, each with a one: nothing was added.
    assert done.stdout.count("world 2, sum 1: the process group adds up wrongly: expected 3.0") == 2

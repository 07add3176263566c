"""The memory of a rank: its part of a layer, and little more while it loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

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
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A model of 100 MB a layer, nearly all of them experts of a square matrix of half a megabyte."""
    folder = tmp_path_factory.mktemp("large") / "large"
    model = SyntheticModel(num_hidden_layers=1, hidden_size=512, intermediate_size=512, num_local_experts=64)
    synthesize(folder, model=model, dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
    return folder, 64 * 3 * 512 * 512 * 2


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
    weights, growth, _ = json.loads(done.stdout)
    assert experts_bytes / degree < weights < 1.1 * experts_bytes / degree
    # Beside them bands of rows, and what threads take.
    assert growth < weights + 16e6 < experts_bytes / 2


@pytest.mark.slow
def test_a_rank_reads_of_other_experts_nothing(forked_python: Any, large: tuple[Path, int]) -> None:
    folder, experts_bytes = large
    done = forked_python(LOAD.format(folder=str(folder), degree=8, expert_degree=8))
    _, _, num_bytes_read = json.loads(done.stdout)
    assert num_bytes_read < 1.2 * experts_bytes / 8
